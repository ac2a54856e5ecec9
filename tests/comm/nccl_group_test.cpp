// The group of GPUs, as processes: on a machine with a GPU over NCCL itself, else over the emulator's.
#include "comm/nccl_group.h"

#include <chrono>
#include <cstring>
#include <thread>

#include "group_cases.h"
#include "tests/support/gpu_ranks.h"

namespace lm {
namespace {

// The cases of every group speak of host memory: this takes it to the device and back.
class ThroughDevice final : public Group {
 public:
  explicit ThroughDevice(GpuRank& rank) : group_(rank.group), compute_(rank.compute) {}
  int rank() const override { return group_.rank(); }
  int ranks() const override { return group_.ranks(); }
  void all_gather_among(const Members& members, const char* what, std::byte* data,
                        std::span<const ByteRange> shards, int64_t longest) override {
    const int64_t bytes = end_of(shards);
    const Memory memory(DeviceType::kCuda, bytes);
    copy_bytes(memory.data(), data, bytes, compute_);
    group_.begin_after(compute_);
    group_.all_gather_among(members, what, memory.data(), shards, longest);
    group_.end_before(compute_);
    copy_bytes(data, memory.data(), bytes, compute_);
    synchronize(compute_);
    group_.check();
  }
  void reduce_scatter_among(const Members& members, const char* what, const std::byte* data,
                            std::span<const ByteRange> shards, int64_t longest, const Add& add) override {
    const int64_t bytes = end_of(shards);
    const Memory memory(DeviceType::kCuda, bytes);
    copy_bytes(memory.data(), data, bytes, compute_);
    group_.begin_after(compute_);
    const StreamView stream = group_.stream(compute_);
    group_.reduce_scatter_among(members, what, memory.data(), shards, longest,
                                [&](int64_t offset, int64_t length, std::span<const std::byte* const> from) {
                                  std::vector<std::vector<std::byte>> host;
                                  std::vector<const std::byte*> parts;
                                  for (const std::byte* const part : from) {
                                    host.emplace_back(static_cast<size_t>(length));
                                    copy_bytes(host.back().data(), part, length, stream);
                                    parts.push_back(host.back().data());
                                  }
                                  synchronize(stream);
                                  group_.check();
                                  add(offset, length, parts);
                                });
    group_.end_before(compute_);
    synchronize(compute_);
    group_.check();
  }

 private:
  static int64_t end_of(std::span<const ByteRange> shards) {
    int64_t end = 0;
    for (const ByteRange& run : shards) end = std::max(end, run.begin + run.bytes);
    return end;
  }
  NcclGroup& group_;
  StreamView compute_;
};

class NcclGroups : public ::testing::TestWithParam<int> {};

TEST_P(NcclGroups, MoveWhatEveryGroupMoves) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = GetParam(), .staging = 1 << 17}, [](GpuRank& rank) {
    ThroughDevice group(rank);
    all_gather_gives_everyone_every_run(group);
    reduce_scatter_brings_every_rank_its_run_of_all(group);
    a_reduce_scatter_among_some_brings_theirs(group);
    a_reduce_scatter_may_add_where_the_array_is(group);
    const int64_t before = rank.group.sent_bytes();
    std::vector<std::byte> text(70000, rank.group.rank() == 0 ? std::byte{7} : std::byte{0});
    group.broadcast("broadcast", text);
    EXPECT_EQ(text, std::vector<std::byte>(70000, std::byte{7}));
    const std::vector<double> all = group.gather("gather", 0.5 + group.rank());
    for (int r = 0; r < group.ranks(); ++r) EXPECT_EQ(all[static_cast<size_t>(r)], 0.5 + r);
    EXPECT_EQ(rank.group.sent_bytes() - before, (8 + (group.rank() == 0 ? 70000 : 0)) * (group.ranks() - 1));
  }));
}

INSTANTIATE_TEST_SUITE_P(Ranks, NcclGroups, ::testing::Values(2, 3, 4));

TEST_P(NcclGroups, WhatIsSharedCrossesOncePerMachine) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = GetParam()}, [](GpuRank& rank) {
    ThroughDevice group(rank);
    what_is_shared_crosses_once_per_machine(group, rank.group);
  }));
}

TEST_P(NcclGroups, GroupsShareTheirOwnAndCopies) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = GetParam()}, [](GpuRank& rank) {
    ThroughDevice group(rank);
    groups_share_their_own_and_copies(group, rank.group);
  }));
}

// Nobody waits between the calls: what follows what is the streams' matter.
TEST(NcclGroup, FollowsTheCallersStreamAndIsFollowedByIt) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = 2}, [](GpuRank& rank) {
    constexpr int64_t kEach = 30000;
    constexpr int kRounds = 20;
    const int me = rank.group.rank();
    const std::vector<ByteRange> shards{{0, kEach}, {kEach, kEach}};
    const Memory array(DeviceType::kCuda, 2 * kEach), seen(DeviceType::kCuda, 2 * kEach * kRounds),
        source(DeviceType::kCuda, kEach * kRounds);
    std::vector<std::byte> made(static_cast<size_t>(kEach * kRounds)),
        host(static_cast<size_t>(2 * kEach * kRounds));
    for (int64_t i = 0; i < std::ssize(made); ++i) made[static_cast<size_t>(i)] = value(me, i);
    copy_bytes(source.data(), made.data(), made.size(), rank.compute);
    for (int64_t round = 0; round < kRounds; ++round) {
      // On the device: a copy from the host's memory would be over when the call returns.
      copy_bytes(array.data() + me * kEach, source.data() + round * kEach, kEach, rank.compute);
      rank.group.begin_after(rank.compute);
      rank.group.all_gather("share", array.data(), shards);
      rank.group.end_before(rank.compute);
      copy_bytes(seen.data() + round * 2 * kEach, array.data(), 2 * kEach, rank.compute);
    }
    copy_bytes(host.data(), seen.data(), seen.size(), rank.compute);
    synchronize(rank.compute);
    rank.group.check();
    for (int64_t i = 0; i < std::ssize(host); ++i) {
      const int64_t round = i / (2 * kEach), at = i % (2 * kEach);
      ASSERT_EQ(host[static_cast<size_t>(i)], value(static_cast<int>(at / kEach), round * kEach + at % kEach))
          << i;
    }
  }));
}

// A call to which not all come, and the wait for it.
void wait_for_others(GpuRank& rank) {
  const std::vector<ByteRange> shards{{0, 64}, {64, 64}, {128, 64}};
  const Memory array(DeviceType::kCuda, 192);
  rank.group.all_gather("gather of an array", array.data(), shards);
  rank.group.end_before(rank.compute);
  synchronize(rank.compute);
  rank.group.check();
}

// Whoever looks at traces waits for nothing: an emulator that does nothing before somebody waits would do
// nothing.
const std::vector<std::string> kEager = {"EMULATOR_LAZY=0"};

// The group's thread looks five times a second. Two collectives were the start's.
bool comes_to(const GpuRank& rank, const std::string& where) {
  for (int i = 0; i < 1000; ++i) {
    if (rank.group.device()->where == where) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  ADD_FAILURE() << "rank " << rank.group.rank() << ": \"" << rank.group.device()->where << "\" is not \""
                << where << "\"";
  return false;
}

TEST(NcclGroup, TracesOfCollectivesSayForWhomAGpuWaits) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = 3, .variables = kEager}, [](GpuRank& rank) {
    const std::vector<ByteRange> shards{{0, 64}, {64, 64}, {128, 64}};
    const Memory array(DeviceType::kCuda, 192);
    rank.group.all_gather("first", array.data(), shards);
    comes_to(rank, "has completed all 3 collectives");
    EXPECT_FALSE(rank.group.waits());
    rank.peers.barrier("all have done it");
    if (rank.group.rank() != 1) {
      rank.group.all_gather("second", array.data(), shards);
      comes_to(
          rank,
          "waits in \"second\" (collective 4) for rank 1, whose GPU has completed 3 of 3 enqueued there");
      EXPECT_TRUE(rank.group.waits());
      EXPECT_TRUE(rank.group.device()->inside);
    }
    rank.peers.barrier("all have looked");
    if (rank.group.rank() == 1) rank.group.all_gather("second", array.data(), shards);
    comes_to(rank, "has completed all 4 collectives");
    EXPECT_FALSE(rank.group.waits());
  }));
}

TEST(NcclGroup, CollectivesHaveTheSameNumbersWhereSomeHaveNothingToMove) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = 4, .variables = kEager}, [](GpuRank& rank) {
    const int me = rank.group.rank(), first = me / 2 * 2;
    const int64_t each = me < 2 ? 64 : 0;
    const Memory array(DeviceType::kCuda, 128);
    const std::vector<ByteRange> shards{{0, each}, {each, each}};
    const Members members = every(1, first, 2, me - first);
    rank.group.all_gather_among(members, "shared by two of four", array.data(), shards, 64);
    rank.group.reduce_scatter_among(members, "exchanged by two of four", array.data(), shards, 64,
                                    [](int64_t, int64_t, std::span<const std::byte* const>) {});
    comes_to(rank, "has completed all 4 collectives");
  }));
}

TEST(NcclGroup, ARankThatHasEndedEndsTheOthers) {
  LM_NEEDS_GPU();
  const std::vector<GpuRankEnd> ends = with_gpus({.ranks = 3}, [](GpuRank& rank) {
    if (rank.group.rank() != 1) return wait_for_others(rank);
    std::this_thread::sleep_for(std::chrono::milliseconds(1000));
    rank.region.end();  // as the CLI process does
    _exit(3);
  });
  EXPECT_EQ(ends[1].code, 3);
  for (const size_t r : {0, 2}) {
    const std::string number = std::to_string(r);
    EXPECT_EQ(ends[r].code, 0);
    EXPECT_EQ(
        ends[r].error,
        "40 another rank has ended during \"gather of an array\"; on here the GPU of rank " + number +
            " waits in \"gather of an array\" (collective 3) for rank 1, whose GPU has completed 2 of 2 "
            "enqueued there at rank " +
            number);
  }
}

TEST(NcclGroup, ARankThatIsStoppedIsNamed) {
  LM_NEEDS_GPU();
  const std::vector<GpuRankEnd> ends = with_gpus(
      {.ranks = 3, .silence = 1.5},
      [](GpuRank& rank) {
        if (rank.group.rank() == 1) {
          setpgid(
              0,
              0);  // the kernel hangs up a group of processes of which one is stopped and that loses another
          raise(SIGSTOP);
        }
        wait_for_others(rank);
      },
      [](const std::vector<pid_t>& ranks) {
        for (const size_t r : {0, 2}) waitid(P_PID, static_cast<id_t>(ranks[r]), nullptr, WEXITED | WNOWAIT);
        kill(ranks[1], SIGKILL);
      });
  EXPECT_EQ(ends[1].code, -SIGKILL);
  const std::string all = ends[0].error + ends[2].error;
  EXPECT_NE(all.find("41 no heartbeat from rank 1 for "), std::string::npos) << all;
  EXPECT_NE(all.find(", in \"gather of an array\""), std::string::npos) << all;
  for (const size_t r : {0, 2}) EXPECT_NE(ends[r].error, "");
}

TEST(NcclGroup, ARankThatNeverComesEndsTheStart) {
  LM_NEEDS_GPU();
  const SharedRegion unused = SharedRegion::create(1);
  SharedRegion region = SharedRegion::create(2);
  const pid_t child = fork();
  if (child == 0) {
    int code = 1;
    try {
      SharedGroup peers(region, 0);
      std::thread other([&] {
        SharedGroup there(region, 1);
        NcclId id;
        there.broadcast("NCCL's id", std::as_writable_bytes(std::span(&id, 1)));
        region.end();
      });
      other.detach();
      cuda_select(0);
      NcclGroup group({.api = load_nccl(), .peers = peers, .lost = peers.watch(), .host = "here"});
    } catch (const Error& error) {
      code = static_cast<int>(error.code());
    }
    _exit(code);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 40);
}

// NCCL of which a call does not come back until it is aborted.
struct StuckNccl {
  std::atomic<bool> armed = false, aborted = false;
  NcclGroup* group = nullptr;
  std::string known;  // when it was aborted
};
StuckNccl stuck;

NcclApi stuck_api() {
  NcclApi api{};
  api.error_string = [](int) { return ""; };
  api.last_error = [](void*) { return ""; };
  api.unique_id = [](NcclId*) { return kNcclSuccess; };
  api.init = [](void** comm, int, NcclId, int, NcclConfig*) {
    *comm = &stuck;
    return kNcclSuccess;
  };
  api.async_error = [](void*, int* result) { return *result = kNcclSuccess; };
  api.group_start = [] { return kNcclSuccess; };
  api.group_end = [] {
    while (stuck.armed && !stuck.aborted) std::this_thread::yield();
    return kNcclSuccess;
  };
  api.send = [](const void*, size_t, int, int, void*, void*) { return kNcclSuccess; };
  api.receive = [](void*, size_t, int, int, void*, void*) { return kNcclSuccess; };
  api.all_gather = [](const void*, void*, size_t, int, void*, void*) { return kNcclSuccess; };
  api.abort = [](void*) {
    try {
      stuck.group->check();
    } catch (const Error& error) {
      stuck.known = error.what();
    }
    stuck.aborted = true;
    return kNcclSuccess;
  };
  return api;
}

// In a process of its own, as CUDA wants it: what it wrote.
std::string in_a_process(const std::function<std::string()>& body) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    const std::string text = body();
    _exit(write(ends[1], text.data(), text.size()) < 0);
  }
  close(ends[1]);
  char text[1024];
  const ssize_t n = read(ends[0], text, sizeof text);
  close(ends[0]);
  waitpid(child, nullptr, 0);
  return {text, static_cast<size_t>(std::max<ssize_t>(n, 0))};
}

// A call that is stuck holds the lock of calls, and the reason must not be written or read beside it.
TEST(NcclGroup, TheReasonIsKnownBeforeACallThatIsStuckIsAborted) {
  LM_NEEDS_GPU();
  const std::string said = in_a_process([] {
    SharedRegion region = SharedRegion::create(2);
    SharedGroup peers(region, 0);
    std::thread([&] {
      SharedGroup there(region, 1);
      NcclId id;
      there.broadcast("NCCL's id", std::as_writable_bytes(std::span(&id, 1)));
    }).detach();
    cuda_select(0);
    const NcclApi api = stuck_api();
    const auto lost = [](const std::string&) -> std::optional<Error> {
      if (!stuck.armed) return std::nullopt;
      return Error(Exit::kPeerLost, {.area = "X", .what = "rank 1 is gone", .place = "here", .next = ""});
    };
    NcclGroup group({.api = api, .peers = peers, .lost = lost, .host = "here"});
    stuck.group = &group;
    stuck.armed = true;
    std::string thrown = "nothing";
    try {
      const std::vector<ByteRange> shards = {{0, 1}, {1, 1}};
      group.all_gather("weights", nullptr, shards);
    } catch (const Error& error) {
      thrown = error.what();
    }
    return stuck.known + " / " + thrown;
  });
  EXPECT_EQ(said, "rank 1 is gone at here / rank 1 is gone at here");
}

TEST(NcclLibrary, SaysItsVersion) {
  const std::string version = nccl_version();
  EXPECT_GE(version, "2.14");
  EXPECT_EQ(std::count(version.begin(), version.end(), '.'), 2);
}

}  // namespace
}  // namespace lm
