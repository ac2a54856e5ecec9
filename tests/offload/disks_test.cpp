// Real file systems: ext4 and XFS on loop devices of both sector sizes, full ones, ones that lie about their
// room, memory. Each case that this machine cannot make is a skip with its reason.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/bytes.h"
#include "base/error.h"
#include "offload/disk_probe.h"
#include "support.h"
#include "tests/support/until.h"

namespace lm {
namespace {

using namespace offload_tests;

// What the file system counts as free; for all users without root's reserve, as the swap space asks.
int64_t free_bytes(const std::string& directory) {
  struct statvfs info {};
  EXPECT_EQ(::statvfs(directory.c_str(), &info), 0);
  return static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
}

struct DiskKind {
  const char* file_system;
  int sector;
};

class Disks : public ::testing::TestWithParam<DiskKind> {
 protected:
  void SetUp() override {
    if (!disk_.why_not().empty()) GTEST_SKIP() << disk_.why_not();
  }
  // mkfs.xfs refuses less than 300 MB; the image is sparse
  LoopDisk disk_{GetParam().file_system, 320 * kMiB, GetParam().sector};
};

TEST_P(Disks, GiveTheSameBytesWithEveryEngine) {
  if (!ring_allowed()) GTEST_SKIP() << "io_uring is refused here";
  std::vector<std::vector<uint64_t>> sums;
  for (IoEngineKind kind : {IoEngineKind::kUring, IoEngineKind::kThreads}) {
    SwapSpace space({{disk_.path()}}, workload_bytes());
    std::string reason;
    EXPECT_TRUE(space.direct(0, &reason)) << reason;
    EXPECT_EQ(space.alignment(), 4096);
    PinnedPool pool(DeviceType::kCpu, workload_pool_bytes());
    const auto queue = make_queue(space, pool, kind);
    const WorkloadResult result = run_workload(space, *queue, pool, 3);
    EXPECT_EQ(result.wrong, 0u) << queue->description();
    EXPECT_EQ(queue->description().starts_with("io_uring, "), kind == IoEngineKind::kUring);
    sums.push_back(result.sums);
  }
  EXPECT_EQ(sums[0], sums[1]);
}

TEST_P(Disks, KeepArraysOfAnyLength) {
  const int64_t tails[] = {0, 1, 511, 512, 4095, 4096, 4097};
  for (IoEngineKind kind : {IoEngineKind::kAuto, IoEngineKind::kThreads}) {
    SwapSpace space({{disk_.path()}}, 8 * 8192);
    PinnedPool pool(DeviceType::kCpu, 16 * 8192);
    const auto queue = make_queue(space, pool, kind);
    for (int64_t bytes : tails) {
      SCOPED_TRACE(bytes);
      const Extent extent = space.allocate(bytes);
      EXPECT_EQ(extent.bytes, space.padded(bytes));
      PinnedBlock out = pool.lease(8192), in = pool.lease(8192);
      std::memset(out.data(), 0, 8192);
      fill(out.bytes(), static_cast<uint64_t>(bytes));
      std::memset(in.data(), 0xEE, 8192);
      const Ticket written = queue->write(extent, out.data(), space.padded(bytes), "tail");
      queue->wait(queue->read(extent, in.data(), space.padded(bytes), "tail", {{written}}));
      EXPECT_EQ(std::memcmp(out.data(), in.data(), static_cast<size_t>(bytes)), 0);
      for (int64_t i = space.padded(bytes); i < 8192; ++i) ASSERT_EQ(in.data()[i], std::byte{0xEE});
    }
  }
}

TEST_P(Disks, AreFreeAgainAfterAKill) {
  const int64_t before = free_bytes(disk_.path());
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    SwapSpace space({{disk_.path()}}, 32 * kMiB);
    PinnedPool pool(DeviceType::kCpu, 32 * kMiB);
    const auto queue = make_queue(space, pool, IoEngineKind::kAuto);
    const Extent extent = space.allocate(32 * kMiB);
    PinnedBlock block = pool.lease(32 * kMiB);
    queue->wait(queue->write(extent, block.data(), 16 * kMiB, "state"));
    [[maybe_unused]] const ssize_t told = ::write(ready[1], "1", 1);
    for (;;) queue->wait(queue->write(extent, block.data(), 32 * kMiB, "state"));  // killed mid-write
  }
  ::close(ready[1]);
  char byte = 0;
  EXPECT_EQ(::read(ready[0], &byte, 1), 1);
  ::close(ready[0]);
  EXPECT_LE(free_bytes(disk_.path()), before - 32 * kMiB);
  int named = 0;
  for (const auto& entry : std::filesystem::directory_iterator(disk_.path()))
    named += entry.path().filename() != "lost+found";
  EXPECT_EQ(named, 0);
  ::kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFSIGNALED(status));
  test::until([&] { return free_bytes(disk_.path()) >= before; });
  EXPECT_EQ(free_bytes(disk_.path()), before);
}

TEST_P(Disks, ThatAreFullAreRefusedAtTheStart) {
  const int64_t free = free_bytes(disk_.path()), needed = round_up(free + kMiB, 4096);
  try {
    SwapSpace({{disk_.path()}}, needed);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kNoSpace);
    EXPECT_EQ(error.text().place, disk_.path());
    EXPECT_NE(error.text().what.find(std::to_string(needed)), std::string::npos) << error.report();
  }
  EXPECT_EQ(free_bytes(disk_.path()), free);
  // What is reserved is there, though others fill the rest.
  SwapSpace space({{disk_.path()}}, workload_bytes());
  const SwapSpace rest({{disk_.path()}}, free_bytes(disk_.path()) * 9 / 10);
  PinnedPool pool(DeviceType::kCpu, workload_pool_bytes());
  EXPECT_EQ(run_workload(space, *make_queue(space, pool, IoEngineKind::kAuto), pool, 1).wrong, 0u);
}

INSTANTIATE_TEST_SUITE_P(Loop, Disks,
                         ::testing::Values(DiskKind{"ext4", 512}, DiskKind{"ext4", 4096},
                                           DiskKind{"xfs", 512}, DiskKind{"xfs", 4096}),
                         [](const auto& info) {
                           return std::string(info.param.file_system) + "_" +
                                  std::to_string(info.param.sector);
                         });

TEST(DisksTogether, HoldAStripeWhateverTheirSectors) {
  const LoopDisk a("ext4", 64 * kMiB, 4096), b("ext4", 64 * kMiB, 512);
  for (const LoopDisk* disk : {&a, &b}) {
    if (!disk->why_not().empty()) GTEST_SKIP() << disk->why_not();
  }
  constexpr int64_t kBytes = 8 * kMiB;
  SwapSpace space({{a.path(), 3}, {b.path(), 1}}, kBytes);
  PinnedPool pool(DeviceType::kCpu, 2 * kBytes);
  const auto queue = make_queue(space, pool, IoEngineKind::kAuto);
  const Extent extent = space.allocate(kBytes);
  ASSERT_EQ(extent.pieces.size(), 2u);
  PinnedBlock out = pool.lease(kBytes), in = pool.lease(kBytes);
  fill(out.bytes(), 4);
  const Ticket written = queue->write(extent, out.data(), kBytes, "x");
  queue->wait(queue->read(extent, in.data(), kBytes, "x", {{written}}));
  EXPECT_TRUE(wrong_chunks(in.bytes(), chunk_checksums(out.bytes())).empty());
}

// Memory of a limited size as a directory.
class SmallMemory {
 public:
  explicit SmallMemory(const std::string& size)
      : mounted_(::mount("none", directory_.path().c_str(), "tmpfs", 0, ("size=" + size).c_str()) == 0) {}
  ~SmallMemory() {
    if (!mounted_) return;
    EXPECT_EQ(::umount(directory_.path().c_str()), 0);
  }
  SmallMemory(const SmallMemory&) = delete;
  SmallMemory& operator=(const SmallMemory&) = delete;
  bool mounted() const { return mounted_; }
  const std::string& path() const { return directory_.path(); }

 private:
  TemporaryDirectory directory_;
  bool mounted_;
};

// A file system that reserved what its thin device does not have: fallocate cannot see it, the write does.
TEST(ThinDisks, ThatRunOutAreAnErrorOfTheWrite) {
  for (IoEngineKind kind : {IoEngineKind::kAuto, IoEngineKind::kThreads}) {
    const SmallMemory memory("24m");
    if (!memory.mounted()) GTEST_SKIP() << "cannot mount";
    const LoopDisk disk("ext4", 64 * kMiB, 512, memory.path());
    if (!disk.why_not().empty()) GTEST_SKIP() << disk.why_not();
    constexpr int64_t kBytes = 32 * kMiB;
    SwapSpace space({{disk.path()}}, kBytes);
    PinnedPool pool(DeviceType::kCpu, kBytes);
    const auto queue = make_queue(space, pool, kind, kMiB);
    PinnedBlock block = pool.lease(kBytes);
    fill(block.bytes(), 1);
    try {
      queue->wait(queue->write(space.allocate(kBytes), block.data(), kBytes, "moments of layers.3"));
      ADD_FAILURE() << "32 MiB went onto a disk of 24";
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == Exit::kIo || error.code() == Exit::kNoSpace) << error.report();
      EXPECT_NE(error.text().what.find("write of moments of layers.3: at offset "), std::string::npos)
          << error.report();
      EXPECT_TRUE(error.text().place.starts_with(disk.path() + "+")) << error.report();
    }
  }
}

TEST(MemoryDisks, WorkAndSayWhetherTheyAreDirect) {
  const std::string shm = "/dev/shm";
  if (!std::filesystem::is_directory(shm) || ::access(shm.c_str(), W_OK) != 0) GTEST_SKIP() << "no /dev/shm";
  SwapSpace space({{shm}}, workload_bytes());
  std::string reason;
  EXPECT_EQ(space.direct(0, &reason), reason.empty());
  PinnedPool pool(DeviceType::kCpu, workload_pool_bytes());
  EXPECT_EQ(run_workload(space, *make_queue(space, pool, IoEngineKind::kAuto), pool, 1).wrong, 0u);
}

TEST(DiskProbe, MeasuresAndLeavesNothing) {
  const TemporaryDirectory directory;
  const DiskProbe probe = probe_disk(directory.path(), IoEngineKind::kAuto, 64 * kMiB);
  for (double rate : {probe.read_bytes_per_s, probe.write_bytes_per_s, probe.both_bytes_per_s})
    EXPECT_GT(rate, 1e6);
  EXPECT_GE(probe.measured_bytes, 2 * kMiB);
  EXPECT_GE(probe.alignment, 4096);
  EXPECT_GT(probe.free_bytes, 0);
  EXPECT_FALSE(probe.engine.empty());
  EXPECT_EQ(directory.entries(), 0);
}

TEST(DiskProbe, UsesAQuarterOfASmallDisk) {
  const LoopDisk disk("ext4", 48 * kMiB, 512);
  if (!disk.why_not().empty()) GTEST_SKIP() << disk.why_not();
  const DiskProbe probe = probe_disk(disk.path());
  EXPECT_LE(probe.measured_bytes, 12 * kMiB);
  EXPECT_GT(probe.read_bytes_per_s, 0);
}

}  // namespace
}  // namespace lm
