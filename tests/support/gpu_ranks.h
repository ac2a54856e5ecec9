// Ranks with a GPU each, as processes: they are forked before anything of CUDA has begun, share host memory,
// and all compute on the first device (each with an NCCL_HOSTID of its own, as NCCL refuses two ranks of one
// machine on one GPU).
#pragma once

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/cuda.h"
#include "base/error.h"
#include "comm/nccl_group.h"
#include "comm/shared_group.h"

namespace lm {

// What a rank of a test has.
struct GpuRank {
  SharedRegion& region;
  SharedGroup& peers;
  NcclGroup& group;
  StreamView compute;
};

// How a rank has ended: its exit code, or minus the signal; and what it threw.
struct GpuRankEnd {
  int code = 0;
  std::string error;
};

struct GpuRanks {
  int ranks = 2;
  int64_t staging = int64_t{1} << 20;
  double silence = 20;
  std::vector<std::string> variables = {};  // "NAME=VALUE"
  bool own_hosts = true;
  unsigned seconds = 120;  // after which a rank that hangs is ended
};

namespace detail {

inline int run_gpu_rank(const GpuRanks& setup, SharedRegion& region, int rank, int out,
                        const std::function<void(GpuRank&)>& body) {
  alarm(setup.seconds);
  setenv("NCCL_SOCKET_IFNAME", "lo", 1);
  setenv("NCCL_NET", "Socket", 1);  // between "hosts" that are none
  if (setup.own_hosts) setenv("NCCL_HOSTID", ("host" + std::to_string(rank)).c_str(), 1);
  for (const std::string& variable : setup.variables) {
    const size_t equals = variable.find('=');
    setenv(variable.substr(0, equals).c_str(), variable.substr(equals + 1).c_str(), 1);
  }
  try {
    SharedGroup peers(region, rank, setup.silence);
    cuda_select(0);
    const Stream compute(DeviceType::kCuda);
    NcclGroup group({.api = load_nccl(),
                     .peers = peers,
                     .lost = peers.watch(),
                     .region = &region,
                     .host = "here",
                     .staging = setup.staging});
    GpuRank self{region, peers, group, compute.view()};
    body(self);
    group.leave();
  } catch (const Error& error) {
    const std::string text = std::to_string(static_cast<int>(error.code())) + " " + error.what();
    [[maybe_unused]] const ssize_t written = write(out, text.data(), text.size());
    region.end();  // as the CLI process does
  }
  std::fflush(nullptr);
  return ::testing::Test::HasFailure() ? 1 : 0;
}

}  // namespace detail

// Whether there is a GPU; asked in a process of its own.
inline bool gpu_is_here() {
  const pid_t child = fork();
  if (child == 0) _exit(cuda_device_count() > 0 ? 0 : 77);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// `meanwhile` is called with the processes once they have been started.
inline std::vector<GpuRankEnd> with_gpus(
    const GpuRanks& setup, const std::function<void(GpuRank&)>& body,
    const std::function<void(const std::vector<pid_t>&)>& meanwhile = {}) {
  SharedRegion region = SharedRegion::create(setup.ranks);
  std::vector<pid_t> children;
  std::vector<int> texts;
  std::fflush(nullptr);
  for (int r = 0; r < setup.ranks; ++r) {
    int ends[2];
    if (pipe(ends) != 0) throw std::runtime_error("no pipe");
    const pid_t child = fork();
    if (child == 0) _exit(detail::run_gpu_rank(setup, region, r, ends[1], body));
    close(ends[1]);
    children.push_back(child);
    texts.push_back(ends[0]);
  }
  if (meanwhile) meanwhile(children);
  std::vector<GpuRankEnd> out;
  for (int r = 0; r < setup.ranks; ++r) {
    int status = 0;
    waitpid(children[static_cast<size_t>(r)], &status, 0);
    GpuRankEnd end{.code = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), .error = {}};
    char text[2048];
    const int fd = texts[static_cast<size_t>(r)];
    if (const ssize_t n = read(fd, text, sizeof text); n > 0) end.error.assign(text, static_cast<size_t>(n));
    close(fd);
    out.push_back(end);
  }
  return out;
}

inline void expect_good_ends(const std::vector<GpuRankEnd>& ends) {
  for (size_t r = 0; r < ends.size(); ++r) {
    EXPECT_EQ(ends[r].code, 0) << "rank " << r;
    EXPECT_EQ(ends[r].error, "") << "rank " << r;
  }
}

#define LM_NEEDS_GPU() \
  if (!gpu_is_here()) GTEST_SKIP() << "no GPU"

}  // namespace lm
