// What NCCL leaves undefined, or says only on many machines, and the emulator's says: our table of its
// functions against its header, different calls on different ranks, one GPU for two ranks, errors out of
// nowhere.
#include <cuda_runtime_api.h>
#include <nccl.h>

#include <atomic>
#include <cstddef>

#include "tests/emulator/emulator.h"
#include "tests/support/gpu_ranks.h"

namespace lm {
namespace {

static_assert(sizeof(NcclId) == sizeof(ncclUniqueId) && alignof(NcclId) == alignof(ncclUniqueId));
static_assert(offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic) &&
              offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version) &&
              offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(kNcclSuccess == ncclSuccess && kNcclInProgress == ncclInProgress && kNcclBytes == ncclInt8);
static_assert(sizeof(ncclResult_t) == sizeof(int) && sizeof(ncclDataType_t) == sizeof(int));

// Calls of NCCL itself.
class Plain {
 public:
  explicit Plain(GpuRank& rank)
      : rank_(rank),
        stream_(static_cast<cudaStream_t>(rank.compute.handle)),
        memory_(DeviceType::kCuda, 4096) {
    ncclUniqueId id{};
    if (rank.peers.rank() == 0) ncclGetUniqueId(&id);
    rank.peers.broadcast("an id", std::as_writable_bytes(std::span(&id, 1)));
    EXPECT_EQ(ncclCommInitRank(&comm_, rank.peers.ranks(), id, rank.peers.rank()), ncclSuccess);
  }
  ~Plain() { ncclCommAbort(comm_); }
  ncclComm_t comm() const { return comm_; }
  cudaStream_t stream() const { return stream_; }
  std::byte* memory() const { return memory_.data(); }
  template <class T>
  void put(const std::vector<T>& values) {
    copy_bytes(memory(), values.data(), std::ssize(values) * static_cast<int64_t>(sizeof(T)), rank_.compute);
    cudaStreamSynchronize(stream_);
  }
  template <class T>
  std::vector<T> get(size_t count) {
    std::vector<T> out(count);
    copy_bytes(out.data(), memory(), static_cast<int64_t>(count * sizeof(T)), rank_.compute);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return out;
  }

 private:
  GpuRank& rank_;
  cudaStream_t stream_;
  Memory memory_;
  ncclComm_t comm_ = nullptr;
};

TEST(EmulatorNccl, ReducesInTheOrderOfRanks) {
  expect_good_ends(with_gpus({.ranks = 3}, [](GpuRank& rank) {
    Plain nccl(rank);
    const int me = rank.peers.rank();
    const std::vector<float> mine = me == 0   ? std::vector<float>{1e8F, 1, 2}
                                    : me == 1 ? std::vector<float>{-1e8F, 1, 2}
                                              : std::vector<float>{0.5F, 1, 2};
    nccl.put(mine);
    ncclAllReduce(nccl.memory(), nccl.memory(), 3, ncclFloat32, ncclSum, nccl.comm(), nccl.stream());
    EXPECT_EQ(nccl.get<float>(3), (std::vector<float>{0.5F, 3, 6}));  // (1e8 - 1e8) + 0.5
    nccl.put(std::vector<int64_t>{me, 10 + me, 20 + me});
    ncclReduceScatter(nccl.memory(), nccl.memory(), 1, ncclInt64, ncclMax, nccl.comm(), nccl.stream());
    EXPECT_EQ(nccl.get<int64_t>(1), std::vector<int64_t>{10 * me + 2});
  }));
}

void expect_both_named(const GpuRanks& setup, const std::function<void(GpuRank&, Plain&)>& calls,
                       const std::string& named) {
  const std::vector<GpuRankEnd> ends = with_gpus(setup, [&](GpuRank& rank) {
    Plain nccl(rank);
    calls(rank, nccl);
    cudaStreamSynchronize(nccl.stream());
    ncclResult_t state = ncclSuccess;
    ncclCommGetAsyncError(nccl.comm(), &state);
    if (state == ncclSuccess) return;
    throw Error(Exit::kInternal,
                {.area = "X", .what = ncclGetLastError(nccl.comm()), .place = "", .next = "", .kept = ""});
  });
  std::string all;
  for (const GpuRankEnd& end : ends) all += end.error + "\n";
  EXPECT_NE(all.find(named), std::string::npos) << all;
}

TEST(EmulatorNccl, NamesBothRanksOfDifferentCalls) {
  const auto gather = [](Plain& nccl, size_t count, ncclDataType_t type) {
    ncclAllGather(nccl.memory(), nccl.memory() + 1024, count, type, nccl.comm(), nccl.stream());
  };
  expect_both_named(
      {}, [&](GpuRank& rank, Plain& nccl) { gather(nccl, rank.peers.rank() == 0 ? 8 : 9, ncclInt8); },
      "rank 0 calls all-gather of 8 x int8, call 1, rank 1 all-gather of 9 x int8, call 1");
  expect_both_named(
      {},
      [&](GpuRank& rank, Plain& nccl) {
        gather(nccl, 8, ncclInt32);
        gather(nccl, 8, rank.peers.rank() == 0 ? ncclInt32 : ncclFloat32);
      },
      "rank 1 calls all-gather of 8 x float32, call 2, rank 0 all-gather of 8 x int32, call 2");
  expect_both_named(
      {},
      [&](GpuRank& rank, Plain& nccl) {
        if (rank.peers.rank() == 0) return gather(nccl, 8, ncclInt32);
        ncclBroadcast(nccl.memory(), nccl.memory(), 8, ncclInt32, 1, nccl.comm(), nccl.stream());
      },
      "rank 0 calls all-gather of 8 x int32, call 1, rank 1 broadcast from 1 of 8 x int32, call 1");
  expect_both_named(
      {},
      [&](GpuRank& rank, Plain& nccl) {
        if (rank.peers.rank() == 1) {
          ncclRecv(nccl.memory(), 5, ncclInt8, 0, nccl.comm(), nccl.stream());
          return;
        }
        ncclSend(nccl.memory(), 4, ncclInt8, 1, nccl.comm(), nccl.stream());
        usleep(300000);  // what it sends is never taken
        throw Error(Exit::kInternal, {.area = "X", .what = "gone", .place = "", .next = "", .kept = ""});
      },
      "rank 1 awaits a message of 5 x int8 from rank 0, which sends a message of 4 x int8");
}

// All ranks fail alike, but one that the end of another reaches first ends with that.
void expect_all_fail(const std::vector<GpuRankEnd>& ends, const std::string& how) {
  int named = 0;
  for (const GpuRankEnd& end : ends) {
    const bool names = end.error.find(how) != std::string::npos;
    named += names ? 1 : 0;
    EXPECT_TRUE(names || end.error.starts_with("40 another rank has ended during")) << end.error;
  }
  EXPECT_GE(named, 1) << how;
}

TEST(EmulatorNccl, RefusesOneGpuForTwoRanksOfAMachine) {
  expect_all_fail(with_gpus({.ranks = 2, .own_hosts = false}, [](GpuRank&) {}),
                  "12 NCCL has failed in \"start\": invalid usage (Duplicate GPU detected");
}

// NCCL fails in the second of three calls, and says so only later: which call a rank is in by then, that one
// or the next, is the hour's.
TEST(NcclGroupFailures, AnErrorOfNcclEndsItsRankAndThenTheOthers) {
  const std::vector<GpuRankEnd> ends =
      with_gpus({.ranks = 2, .variables = {"EMULATOR_NCCL=fail:1:4"}}, [](GpuRank& rank) {
        const std::vector<ByteRange> shards{{0, 64}, {64, 64}};
        const Memory array(DeviceType::kCuda, 128);
        for (const char* const what : {"first", "second", "third"})
          rank.group.all_gather(what, array.data(), shards);
        rank.group.end_before(rank.compute);
        synchronize(rank.compute);
        rank.group.check();
      });
  const auto names_call = [&](size_t rank, const std::string& begin, const std::string& end) {
    const std::string& error = ends[rank].error;
    const auto has = [&](const char* call) {
      return error.find(begin + "\"" + call + "\"" + end) != std::string::npos;
    };
    EXPECT_TRUE(has("second") || has("third")) << error;
  };
  names_call(1, "40 NCCL has failed in ", ": remote process exited");
  names_call(0, "40 another rank has ended during ", "");
}

// Two calls were the start's.
bool comes_to(const GpuRank& rank, const std::string& where) {
  for (int i = 0; i < 1000 && rank.group.device()->where != where; ++i) usleep(10000);
  EXPECT_EQ(rank.group.device()->where, where) << "rank " << rank.group.rank();
  return rank.group.device()->where == where;
}

TEST(CollectiveTrace, ACollectiveThatAllHaveEnteredIsWaitedForByNobody) {
  const std::vector<GpuRankEnd> ends =
      with_gpus({.ranks = 2, .variables = {"EMULATOR_NCCL=hang:1:4"}}, [](GpuRank& rank) {
        const std::vector<ByteRange> shards{{0, 64}, {64, 64}};
        const Memory array(DeviceType::kCuda, 128);
        for (const char* const what : {"first", "second"}) rank.group.all_gather(what, array.data(), shards);
        comes_to(rank, "does not complete \"second\" (collective 4), which all ranks have entered");
        EXPECT_FALSE(rank.group.waits());
        EXPECT_TRUE(rank.group.device()->inside);
        rank.peers.barrier("both have looked");
        _exit(::testing::Test::HasFailure() ? 1 : 0);
      });
  expect_good_ends(ends);
}

// What comes before the call never ends: one GPU is not in the call, and the other waits for it.
TEST(CollectiveTrace, AGpuThatHangsBeforeACollectiveDoesNotReachIt) {
  expect_good_ends(with_gpus({.ranks = 2}, [](GpuRank& rank) {
    const std::vector<ByteRange> shards{{0, 64}, {64, 64}};
    const Memory array(DeviceType::kCuda, 128);
    std::atomic<bool> ends = false;
    rank.group.all_gather("first", array.data(), shards);
    if (rank.group.rank() == 1)
      emulator::enqueue(rank.compute.handle, emulator::Kind::kKernel, "never ends", [&ends] {
        while (!ends) usleep(1000);
      });
    rank.group.begin_after(rank.compute);
    rank.group.all_gather("second", array.data(), shards);
    comes_to(
        rank,
        rank.group.rank() == 1
            ? "has completed collective 3 and does not reach \"second\" (collective 4)"
            : "waits in \"second\" (collective 4) for rank 1, whose GPU has completed 3 of 4 enqueued there");
    EXPECT_EQ(rank.group.waits(), rank.group.rank() == 0);
    rank.peers.barrier("both have looked");
    ends = true;
    comes_to(rank, "has completed all 4 collectives");
  }));
}

TEST(NcclGroupFailures, MemoryOfTheHostIsRefused) {
  const std::vector<GpuRankEnd> ends = with_gpus({.ranks = 2}, [](GpuRank& rank) {
    std::vector<std::byte> host(128);
    rank.group.all_gather("host memory", host.data(), std::vector<ByteRange>{{0, 64}, {64, 64}});
  });
  expect_all_fail(ends, "NCCL has failed in \"host memory\": invalid argument");
}

}  // namespace
}  // namespace lm
