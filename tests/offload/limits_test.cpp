// What a machine may refuse: io_uring, locked memory, large files. Each in a process of its own.
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstddef>

#include "base/bytes.h"
#include "base/error.h"
#include "support.h"

namespace lm {
namespace {

using namespace offload_tests;

// From here on this process's io_uring_setup fails with `error`, as under a container's filter.
void refuse_rings(int error) {
  sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(code)), code};
  if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
    throw std::runtime_error("no seccomp here");
}

std::string text_of(const WorkloadResult& result) {
  std::string text = std::to_string(result.wrong) + " wrong";
  for (uint64_t sum : result.sums) text += " " + std::to_string(sum);
  return text;
}

class Limits : public ::testing::Test {
 protected:
  std::string run(IoEngineKind kind, std::string* description, std::string* note = nullptr) {
    PinnedPool pool(DeviceType::kCpu, workload_pool_bytes());
    SwapSpace space({{directory_.path()}}, workload_bytes());
    return run_on(space, pool, kind, description, note);
  }
  std::string run_on(SwapSpace& space, PinnedPool& pool, IoEngineKind kind, std::string* description,
                     std::string* note = nullptr) {
    IoQueue queue(
        space,
        [&] {
          const std::span<std::byte> buffers[] = {pool.memory()};
          return make_engine(kind, {.files = space.files(), .buffers = buffers, .depth = 8}, note);
        },
        64 * kKiB);
    *description = queue.description();
    return text_of(run_workload(space, queue, pool, 11));
  }
  TemporaryDirectory directory_;
};

TEST_F(Limits, AForbiddenRingIsReplacedByThreadsWithTheSameBytes) {
  std::string description, note;
  const std::string expected = run(IoEngineKind::kAuto, &description, &note);
  if (!note.empty()) GTEST_SKIP() << note;
  EXPECT_TRUE(expected.starts_with("0 wrong"));
  EXPECT_TRUE(description.starts_with("io_uring")) << description;
  const std::pair<int, std::string> refusals[] = {
      {EPERM, "io_uring unavailable (EPERM: seccomp or kernel.io_uring_disabled): using 8 I/O threads\n"},
      {ENOSYS, "io_uring unavailable (ENOSYS): using 8 I/O threads\n"},
      {ENOMEM, "io_uring unavailable (ENOMEM: RLIMIT_MEMLOCK is too low): using 8 I/O threads\n"}};
  for (const auto& [error, told] : refusals) {
    const ChildResult child = run_in_child([&, error = error] {
      refuse_rings(error);
      std::string how, why;
      const std::string result = run(IoEngineKind::kAuto, &how, &why);
      return why + "\n" + result;
    });
    EXPECT_EQ(child.status, 0) << child.text;
    EXPECT_EQ(child.text, told + expected);
  }
}

TEST_F(Limits, AForbiddenRingThatWasAskedForIsAnError) {
  const ChildResult child = run_in_child([&] {
    refuse_rings(EPERM);
    std::string how;
    return run(IoEngineKind::kUring, &how);
  });
  EXPECT_EQ(WEXITSTATUS(child.status), 21) << child.text;
  EXPECT_NE(child.text.find("io_uring_setup refused: EPERM"), std::string::npos) << child.text;
}

TEST_F(Limits, LittleLockedMemoryOnlyCostsTheRegistration) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root, to become somebody else";
  std::string description;
  const std::string expected = run(IoEngineKind::kAuto, &description);
  for (rlim_t limit : {rlim_t{0}, rlim_t{64 * 1024}}) {
    const ChildResult child = run_in_child([&] {
      SwapSpace space({{directory_.path()}}, workload_bytes());  // its parents may be closed to others
      const rlimit locked{limit, limit};
      if (::setrlimit(RLIMIT_MEMLOCK, &locked) != 0 || ::setgid(65534) != 0 || ::setuid(65534) != 0)
        throw std::runtime_error("cannot become nobody");
      PinnedPool pool(DeviceType::kCpu, workload_pool_bytes());
      std::string how, why;
      const std::string result = run_on(space, pool, IoEngineKind::kAuto, &how, &why);
      return how + " " + why + "\n" + result;
    });
    EXPECT_EQ(child.status, 0) << child.text;
    const size_t end = child.text.find('\n');
    EXPECT_EQ(child.text.substr(end + 1), expected);
    // Which of the two depends on whether the kernel charges the ring too.
    const std::string told = child.text.substr(0, end);
    const bool unregistered =
        told.find("unregistered buffers (ENOMEM: RLIMIT_MEMLOCK is below ") != std::string::npos;
    const bool threads =
        told.find("io_uring unavailable (ENOMEM: RLIMIT_MEMLOCK is too low)") != std::string::npos;
    if (description.find(", registered buffers") != std::string::npos) {
      EXPECT_NE(unregistered, threads) << told;
    }
  }
}

TEST_F(Limits, AFileSizeLimitIsMetAtTheStart) {
  const ChildResult child = run_in_child([&] {
    const rlimit size{kMiB, kMiB};
    ::setrlimit(RLIMIT_FSIZE, &size);
    const SwapSpace space({{directory_.path()}}, 2 * kMiB);
    return std::string("no error");
  });
  EXPECT_EQ(WEXITSTATUS(child.status), 20) << child.text;
  EXPECT_NE(child.text.find("the process's file size limit is 1.00 MiB: EFBIG"), std::string::npos)
      << child.text;
}

// The kernel sends SIGXFSZ too, which would end a process that has not blocked it in its I/O threads.
TEST_F(Limits, AFileSizeLimitThatComesLaterIsAnErrorOfTheWrite) {
  for (IoEngineKind kind : {IoEngineKind::kAuto, IoEngineKind::kThreads}) {
    const ChildResult child = run_in_child([&] {
      SwapSpace space({{directory_.path()}}, 2 * kMiB);
      const rlimit size{kMiB, kMiB};
      ::setrlimit(RLIMIT_FSIZE, &size);
      PinnedPool pool(DeviceType::kCpu, 2 * kMiB);
      const auto queue = make_queue(space, pool, kind);
      PinnedBlock block = pool.lease(2 * kMiB);
      queue->wait(queue->write(space.allocate(2 * kMiB), block.data(), 2 * kMiB, "moments of layers.3"));
      return std::string("no error");
    });
    ASSERT_TRUE(WIFEXITED(child.status)) << child.status;
    EXPECT_EQ(WEXITSTATUS(child.status), 20) << child.text;
    for (const char* part : {"write of moments of layers.3: at offset ", " of 2097152 bytes done, device ",
                             ": EFBIG", "ulimit -f"})
      EXPECT_NE(child.text.find(part), std::string::npos) << child.text;
  }
}

}  // namespace
}  // namespace lm
