// Ranks with a GPU each: the same bits over NCCL as over host memory, whatever a stage shards and wherever
// state lives; and what is moved does not hold up what is computed.
#include <gtest/gtest.h>

#include "gpu_rank_runs.h"
#include "kernels/kernels.h"
#include "optim/gradients.h"
#include "spec/block_layout.h"

namespace lm {
namespace {

using namespace gpu_rank_runs;

TEST(GpuRanks, AStepOfStageThreeHasTheBitsOfTheCpuGroups) {
  LM_NEEDS_GPU();
  for (const int ranks : {2, 4}) {
    Variant run = small_run();
    run.stage = 3;
    Findings nccl, host;
    run_gpus(run, ranks, true, nccl);
    run_gpus(run, ranks, false, host);
    expect_same(nccl, host, run);
  }
}

// Two machines of two, whose partial sums lie on the device.
TEST(GpuRanks, SumsInTwoLevelsHaveTheBitsOfTheCpuGroups) {
  LM_NEEDS_GPU();
  for (const DType gradients : {DType::kF32, DType::kBF16}) {
    Variant run = small_run();
    run.stage = 3, run.nodes = 2;
    run.gradient_dtype = gradients;
    Findings nccl, host, flat;
    run_gpus(run, 4, true, nccl);
    run_gpus(run, 4, false, host);
    expect_same(nccl, host, run);
    if (gradients == DType::kBF16) continue;  // the last rounding hides the order
    run.nodes = 1;
    run_gpus(run, 4, true, flat);
    EXPECT_NE(flat.numbers, nccl.numbers);
  }
}

TEST(GpuRanks, StagesClippingAdaptersAndTiersDoNotChangeABit) {
  LM_NEEDS_GPU();
  for (const bool lora : {false, true}) {
    for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
      Variant first = small_run();
      first.lora = lora, first.clip = clip, first.stage = 0;
      first.tied = lora;  // an embedding by itself goes to host memory with the weights
      first.gradient_dtype = clip == Clip::kBlock ? DType::kBF16 : DType::kF32;
      Findings wanted;
      run_gpus(first, 2, true, wanted);
      for (int i = 1; i < 6; ++i) {
        Variant run = first;
        run.stage = std::min(i, 3);
        run.optimizer = i >= 4;
        run.weights = run.gradients = i == 5;
        run.on_host = i == 5 && clip == Clip::kGlobal;
        run.host = i == 5 ? 1 : 0;
        Findings got;
        run_gpus(run, 2, true, got);
        expect_same(got, wanted, run);
      }
    }
  }
}

// The base of adapters in host memory, which the first rank fills through its GPU, and all fetch; an
// embedding by itself is read where it lies. Against a base on each GPU.
TEST(GpuRanks, OneCopyOfAnOffloadedBaseDoesNotChangeABit) {
  LM_NEEDS_GPU();
  for (int which = 0; which < 3; ++which) {
    Variant first = small_run();
    first.lora = true, first.tied = which != 1;
    if (which == 2) first.base = EncodingKind::kNf4;
    Findings wanted;
    run_gpus(first, 2, true, wanted);
    for (const bool one_copy : {true, false}) {
      Variant run = first;
      run.weights = true, run.host = which == 2 ? 2 : 1, run.one_copy = one_copy;
      Findings got;
      run_gpus(run, 2, true, got);
      expect_same(got, wanted, run);
    }
  }
}

// The slot that blocks share is the group's to read while compute goes on with the next block.
TEST(GpuRanks, UpdatesInsideBackwardDoNotChangeABit) {
  LM_NEEDS_GPU();
  for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
    Variant first = small_run();
    first.clip = clip, first.stage = 0;
    Findings wanted;
    run_gpus(first, 2, true, wanted);
    for (const int stage : {0, 1, 3}) {
      Variant run = first;
      run.stage = stage, run.in_backward = true;
      run.defer_tied_gradient = clip == Clip::kBlock && stage != 1;
      Findings got;
      run_gpus(run, 2, true, got);
      expect_same(got, wanted, run);
    }
  }
}

// Nobody waits for a rank that comes later, unless it needs what that one brings: else this does not end.
// `slots`: gradients are in shards, and pass through one slot.
void reduce_scatter_beside_computation(GpuRank& rank, bool slots) {
  ModelLayout layout;
  layout.blocks.resize(3);
  for (BlockLayout& block : layout.blocks) block.name = "block", block.flat_elements = 4 * kGranule;
  layout.flat_elements = 12 * kGranule;
  constexpr int64_t kBytes = 4 * kGranule * 4;
  ShardStore store({.group = rank.group,
                    .bytes = {0, kBytes, kBytes},
                    .shards =
                        [](int64_t) {
                          return std::vector<ByteRange>{{0, kBytes / 2}, {kBytes / 2, kBytes / 2}};
                        },
                    .name = [](int64_t a) { return "array " + std::to_string(a); },
                    .slots = 2,
                    .gathers = false,
                    .stream = rank.compute});
  RegisteredMemory sums(DeviceType::kCuda, Gradients::norm_bytes(layout));
  Gradients gradients(layout, DType::kF32, kernels(DeviceType::kCuda), rank.compute,
                      {sums.data(), static_cast<size_t>(sums.size())},
                      {.store = slots ? &store : nullptr, .in_slot = {}});
  const Sharding all{rank.group.ranks(), rank.group.ranks()};
  const auto exchange = [&](int64_t unit, int64_t slot) {
    if (gradients.through_slots(unit)) store.allocate_slot(unit, slot);
    zero_bytes(gradients.unit(unit), kBytes, rank.compute);
    gradients.reduce_scatter(unit, rank.group, all, 1);
    if (gradients.through_slots(unit)) store.write_back(unit);
    gradients.granule_norms(unit, rank.group, all);
  };
  exchange(0, 0);  // connects the ranks, for which both are needed
  rank.group.end_before(rank.compute);
  synchronize(rank.compute);
  if (rank.group.rank() == 1) rank.peers.barrier("computed");
  exchange(1, 0);
  Event computed(DeviceType::kCuda);
  computed.record(rank.compute);
  computed.synchronize();
  if (rank.group.rank() == 0) rank.peers.barrier("computed");
  exchange(2, 0);  // where the one before was
  rank.group.end_before(rank.compute);
  gradients.send_squares();
  synchronize(rank.compute);
  rank.group.check();
  EXPECT_EQ(gradients.total_square(), 0);
}

TEST(GpuRanks, AReduceScatterDoesNotHoldUpWhatIsComputedBesideIt) {
  LM_NEEDS_GPU();
  for (const bool slots : {false, true})
    expect_good_ends(
        with_gpus({.ranks = 2}, [&](GpuRank& rank) { reduce_scatter_beside_computation(rank, slots); }));
}

// An array that compute has made in its slot, and nobody has waited for.
ShardStore with_one_made(GpuRank& rank) {
  ShardStore store({.group = rank.group,
                    .bytes = {8192, 8192},
                    .shards =
                        [](int64_t) {
                          return std::vector<ByteRange>{{0, 4096}, {4096, 4096}};
                        },
                    .name = [](int64_t a) { return "array " + std::to_string(a); },
                    .slots = 1,
                    .stream = rank.compute});
  store.allocate_slot(0, 0);
  zero_bytes(store.use(0), 8192, rank.compute);
  return store;
}

// The order checker sees whether they are: the slot's next array, and the shard's way back.
TEST(GpuRanks, AFetchFollowsWhatItsSlotWasUsedFor) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = 2}, [](GpuRank& rank) {
    ShardStore store = with_one_made(rank);
    store.fetch(1, 0);
    rank.group.end_before(rank.compute);
    synchronize(rank.compute);
  }));
}

TEST(GpuRanks, AShardGoesBackOnceItIsMade) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = 2}, [](GpuRank& rank) {
    ShardStore store = with_one_made(rank);
    store.write_back(0);
    rank.group.end_before(rank.compute);
    synchronize(rank.compute);
  }));
}

// Compute has changed the shard in place, and nobody has waited for that either.
TEST(GpuRanks, AFetchFollowsTheUpdateOfItsShard) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = 2}, [](GpuRank& rank) {
    ShardStore store = with_one_made(rank);
    store.write_back(0);
    store.forget(0);
    const int64_t begin = 4096 * rank.group.rank();
    zero_bytes(store.use_in_place(0) + begin, 4096, rank.compute);
    store.fetch(0, 0);
    std::vector<std::byte> host(8192, std::byte{1});
    copy_bytes(host.data(), store.use(0), 8192, rank.compute);
    synchronize(rank.compute);
    rank.group.check();
    for (const std::byte one : host) ASSERT_EQ(one, std::byte{0});
  }));
}

// Two arrays whose shards are in host memory, and pass through slots of their own.
struct OnTier {
  OnTier(GpuRank& rank, bool gathers)
      : setup{.bytes = {4096, 4096},
              .name = [](int64_t a) { return "shard of array " + std::to_string(a); },
              .slots = 1,
              .slots_on_device = true,
              .in_host = {1, 1},
              .stream = gathers ? rank.compute : rank.group.stream(rank.compute),
              .chunk_sums = kernels(DeviceType::kCuda).chunk_sums},
        pool(DeviceType::kCuda, LocalStore::pinned_bytes(setup)),
        tier(setup, nullptr, nullptr, pool),
        store({.group = rank.group,
               .bytes = {8192, 8192},
               .shards =
                   [](int64_t) {
                     return std::vector<ByteRange>{{0, 4096}, {4096, 4096}};
                   },
               .name = [](int64_t a) { return "array " + std::to_string(a); },
               .slots = 1,
               .gathers = gathers,
               .stream = rank.compute,
               .tier = &tier}) {}
  // Both with this byte; outside of a step.
  void fill(GpuRank& rank, std::byte value) {
    const std::vector<std::byte> made(8192, value);
    for (const int64_t array : {0, 1}) {
      store.allocate_slot(array, 0);
      copy_bytes(store.use(array), made.data(), 8192, rank.compute);
      synchronize(rank.compute);
      store.write_back(array);
      store.forget(array);
    }
  }
  std::vector<std::byte> bytes_of(GpuRank& rank, int64_t array) {
    std::vector<std::byte> host(8192);
    copy_bytes(host.data(), store.use(array), 8192, rank.compute);
    synchronize(rank.compute);
    rank.group.check();
    return host;
  }
  LocalStoreSetup setup;
  PinnedPool pool;
  LocalStore tier;
  ShardStore store;
};

// The schedule's transfers, and the order checker between them.
TEST(GpuRanks, AGatherFollowsTheUpdateOfItsShardOnATier) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = 2}, [](GpuRank& rank) {
    OnTier on(rank, true);
    on.fill(rank, std::byte{3});
    const int64_t begin = 4096 * rank.group.rank();
    for (const int64_t array : {0, 1}) {
      on.tier.fetch(array, 0);
      zero_bytes(on.store.use_in_place(array) + begin, 4096, rank.compute);
      on.store.fetch(array, 0);
      on.tier.write_back(array);
      EXPECT_EQ(on.bytes_of(rank, array), std::vector<std::byte>(8192));
    }
    on.tier.fetch(0, 0);
    on.store.fetch(0, 0);
    EXPECT_EQ(on.bytes_of(rank, 0), std::vector<std::byte>(8192));
  }));
}

TEST(GpuRanks, AShardOfASumFollowsItToATier) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = 2}, [](GpuRank& rank) {
    OnTier on(rank, false);
    on.fill(rank, std::byte{3});
    for (const int64_t array : {0, 1}) {
      on.store.allocate_slot(array, 0);
      zero_bytes(on.store.use(array), 8192, rank.compute);
      on.tier.allocate_slot(array, 0);
      on.store.write_back(array);
      on.tier.write_back(array);
    }
    on.tier.fetch(0, 0);
    on.store.fetch(0, 0);
    const std::vector<std::byte> got = on.bytes_of(rank, 0);
    const int64_t begin = 4096 * rank.group.rank();
    EXPECT_EQ(std::vector<std::byte>(got.begin() + begin, got.begin() + begin + 4096),
              std::vector<std::byte>(4096));
  }));
}

TEST(GpuRanks, AGatherDoesNotHoldUpWhatIsComputedBesideIt) {
  LM_NEEDS_GPU();
  expect_good_ends(with_gpus({.ranks = 2}, [](GpuRank& rank) {
    const int me = rank.group.rank();
    ShardStore store({.group = rank.group,
                      .bytes = {8192, 8192, 8192},
                      .shards =
                          [](int64_t) {
                            return std::vector<ByteRange>{{0, 4096}, {4096, 4096}};
                          },
                      .name = [](int64_t a) { return "array " + std::to_string(a); },
                      .slots = 2,
                      .stream = rank.compute});
    std::vector<std::byte> made(8192), host(8192);
    const auto fill = [](int64_t array, int shard) { return static_cast<std::byte>(16 * array + shard + 1); };
    for (int64_t a = 0; a < 3; ++a) {
      std::fill(made.begin(), made.end(), fill(a, me));
      store.allocate_slot(a, 0);
      copy_bytes(store.use(a), made.data(), 8192, rank.compute);
      synchronize(rank.compute);
      store.write_back(a);
    }
    const auto expect = [&](int64_t array) {
      copy_bytes(host.data(), store.use(array), 8192, rank.compute);
      synchronize(rank.compute);
      rank.group.check();
      for (int64_t i : {0, 4095, 4096, 8191})
        EXPECT_EQ(host[static_cast<size_t>(i)], fill(array, i < 4096 ? 0 : 1)) << array << " " << i;
    };
    store.fetch(0, 0);
    expect(0);
    if (me == 1) rank.peers.barrier("computed");
    store.fetch(1, 1);
    expect(0);  // while the next one is on its way
    if (me == 0) rank.peers.barrier("computed");
    expect(1);
    store.fetch(2, 0);
    expect(2);
    std::vector<std::byte> read(100);
    store.read(0, 4096 * me + 7, read);
    EXPECT_EQ(read, std::vector<std::byte>(100, fill(0, me)));
  }));
}

}  // namespace
}  // namespace lm
