// Plans of weights and gradients in shards off the device: what each rank has where, and what crosses the
// links.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/bytes.h"
#include "plan/traffic.h"
#include "shapes.h"
#include "spec/families/experts.h"
#include "tests/support/oracles/simulate.h"

namespace lm {
namespace {

Case on_disk(int64_t stage, int ranks) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(256)};
  c.config.zero.stage = stage;
  c.config.train.global_batch = 8 * ranks;
  c.config.train.micro_batch = 8;
  c.config.train.recompute = Recompute::kBlock;
  c.config.offload.weights = c.config.offload.gradients = OffloadTier::kNvme;
  c.config.offload.paths = {"/swap"};
  c.machine.disks = {{"/swap", 1'000 * kGiB, 2e9, 1e9}};
  c.world.ranks = ranks;
  return c;
}

int64_t bytes_at(const Plan& plan, const std::string& name, TierId tier_id) {
  int64_t sum = 0;
  for (const ClassBytes& row : plan.classes)
    sum += row.name == name && row.tier_id == tier_id ? row.bytes : 0;
  return sum;
}

TEST(ShardsPlan, EachRankHasItsShareOfADisk) {
  const Plan whole = on_disk(1, 2).plan();
  for (const int ranks : {2, 4, 8}) {
    const Plan second = on_disk(2, ranks).plan(), third = on_disk(3, ranks).plan();
    for (const char* name : {"weights", "gradients"}) {
      const auto all = static_cast<double>(bytes_at(whole, name, TierId::kNvme));
      const auto share = static_cast<double>(bytes_at(third, name, TierId::kNvme));
      EXPECT_NEAR(share * ranks / all, 1, 0.01) << name << " of " << ranks;
      // What stays whole on every rank stays in its memory: the embedding and the final norm.
      EXPECT_EQ(bytes_at(third, name, TierId::kHost), bytes_at(whole, name, TierId::kHost)) << name;
    }
    EXPECT_EQ(bytes_at(second, "weights", TierId::kNvme), bytes_at(whole, "weights", TierId::kNvme));
    EXPECT_EQ(bytes_at(second, "gradients", TierId::kNvme), bytes_at(third, "gradients", TierId::kNvme));
    EXPECT_NE(print_plan(third).find("in shards of " + std::to_string(ranks) + " ranks"), std::string::npos);
  }
}

// Of rules that update whole matrices a rank has some of each block's, and of all blocks its share.
TEST(ShardsPlan, WholeMatricesAreShared) {
  for (const RuleId rule : {Rules::id<Adafactor>(), Rules::id<Muon>()}) {
    Case one = on_disk(1, 2);
    one.config.optimizer.name = rule;
    one.config.offload.optimizer = OffloadTier::kNvme;
    const Plan whole = one.plan();
    for (const int ranks : {2, 4, 8, 16}) {
      Case c = on_disk(3, ranks);
      c.config.optimizer.name = rule;
      c.config.offload.optimizer = OffloadTier::kNvme;
      const Plan plan = c.plan();
      for (const char* name : {"weights", "gradients"}) {
        const auto all = static_cast<double>(bytes_at(whole, name, TierId::kNvme));
        const auto share = static_cast<double>(bytes_at(plan, name, TierId::kNvme));
        EXPECT_NEAR(share * ranks / all, 1, 0.03) << name << " of " << ranks;
      }
      // Of 16 ranks the first has nothing of some blocks, whose shards pass by all the same.
      for (const Pool pool : {Pool::kWeightShards, Pool::kGradientShards})
        EXPECT_EQ(std::ranges::count(plan.placement.pool(pool).off_device, 1), 16) << pool_name(pool);
    }
  }
}

// Of all blocks the first rank has most; of those of a tier another one may, whose bytes are planned.
TEST(ShardsPlan, ATierHasRoomForTheRankWithMostOfItsMatrices) {
  for (const int ranks : {2, 3, 4, 8, 16}) {
    Case c = on_disk(3, ranks);
    c.config.optimizer.name = Rules::id<Adafactor>();
    c.config.offload.optimizer = OffloadTier::kNvme;
    const Plan plan = c.plan();
    const ModelLayout layout = c.layout(nullptr);
    const std::vector<Unit> units = layout.units(false);
    PlacementPlan p = plan.placement;
    ASSERT_EQ(p.pool(Pool::kOptimizer).bytes.size(), units.size()) << "a tile is a unit";
    // What that array takes of the disk on the rank with that place.
    const auto on_disk_of = [&](Pool pool, size_t a, int place) {
      const Shard shard = shard_of(units[a], p.sharding(), place);
      const auto& block = layout.blocks[static_cast<size_t>(units[a].block)];
      const int64_t bytes = pool == Pool::kOptimizer
                                ? plan.numerics.state().bytes(block.count(shard.first, shard.end()))
                                : shard.elements * (pool == Pool::kWeightShards ? 2 : 4);  // bf16, fp32
      return round_up(std::max<int64_t>(bytes, 1), kSlotAlignment);
    };
    int uneven = 0;
    for (size_t kept = 0; kept < units.size(); ++kept) {  // arrays that are not on the disk
      std::vector<int64_t> of_ranks(static_cast<size_t>(ranks));
      int64_t planned = 0;
      for (const Pool pool : {Pool::kOptimizer, Pool::kWeightShards, Pool::kGradientShards}) {
        std::vector<char>& off_device = p.pool(pool).off_device;
        std::fill_n(off_device.begin(), kept, 0);
        planned += p.pool(pool).off_device_bytes(TierId::kNvme);
        for (size_t a = kept; a < off_device.size(); ++a) {
          for (int r = 0; r < ranks && off_device[a] != 0; ++r)
            of_ranks[static_cast<size_t>(r)] += on_disk_of(pool, a, r);
        }
      }
      EXPECT_EQ(planned, of_ranks.front()) << ranks << " ranks, without " << kept;
      planned += p.more_than_first(TierId::kNvme);
      EXPECT_EQ(planned, std::ranges::max(of_ranks)) << ranks << " ranks, without " << kept;
      uneven += planned > of_ranks.front() ? 1 : 0;
    }
    EXPECT_GT(uneven, 0) << ranks;
  }
}

// Of layers with experts and of layers without.
TEST(ShardsPlan, ACallHasTheLongestShardOfItsUnit) {
  Case c{.spec = make_spec({256, 512, 6, 4, 2, 64, 4096}), .machine = cpu_machine(64)};
  c.spec.names = families::expert_names();
  for (size_t layer : {1, 2, 4})
    c.spec.layers[layer].sublayers[1].mixer = ExpertsSpec{.experts = 16, .chosen = 4, .ffn = 96};
  stay_near(c.config);
  c.config.zero.stage = 1;
  c.config.train.micro_batch = 2, c.config.train.global_batch = 8;
  c.world.ranks = 4;
  const ModelLayout layout = c.layout(nullptr);
  const std::vector<Unit> units = layout.units(false);
  for (const RuleId rule : {Rules::id<AdamW>(), Rules::id<Adafactor>(), Rules::id<Muon>()}) {
    c.config.optimizer.name = rule;
    const Plan plan = c.plan();
    const Traffic traffic(layout, plan.numerics, plan.placement, c.world);
    int reduced = 0, gathered = 0;
    for (const Operation& op : make_schedule(plan.step).operations) {
      const Unit& unit = units[static_cast<size_t>(op.unit)];
      const int64_t longest = longest_shard(unit, plan.placement.sharding());
      for (const Collective& call : traffic.of(op)) {
        const bool sums = op.kind == OperationKind::kReduceScatter;
        if (!sums && op.kind != OperationKind::kGather) continue;
        EXPECT_EQ(call.shard, longest * (sums ? 4 : 2)) << unit.block;
        ++(sums ? reduced : gathered);
      }
    }
    EXPECT_GE(reduced, std::ssize(units));
    EXPECT_GE(gathered, std::ssize(units));
  }
}

// Ranks wait for the one with the longest shard: of Adafactor's embedding, a fifth of the model, one has all,
// and of each block one of eight has a matrix, more than a quarter.
TEST(ShardsPlan, AnUpdateTakesAsLongAsThatOfTheLongestShard) {
  const auto seconds = [](RuleId rule, int64_t stage) {
    Case c{.spec = llama_1b(), .machine = cpu_machine(256)};
    stay_near(c.config);
    c.config.optimizer.name = rule;
    c.config.zero.stage = stage;
    c.config.train.global_batch = 64, c.config.train.micro_batch = 8;
    c.world.ranks = 8;
    return c.draft().estimate.by_kind[static_cast<size_t>(OperationKind::kUpdate)];
  };
  const double whole = seconds(Rules::id<Adafactor>(), 1) / seconds(Rules::id<Adafactor>(), 0);
  EXPECT_GT(whole, 0.4);
  EXPECT_LT(whole, 0.5);
  EXPECT_NEAR(seconds(Rules::id<AdamW>(), 1) / seconds(Rules::id<AdamW>(), 0), 1.0 / 8, 1e-6);
}

// Slots are as long as any rank's longest matrix, and the first rank's last blocks have short ones: what
// stays on the device leaves room for these slots.
TEST(ShardsPlan, StateThatStaysLeavesRoomForSlotsOfEveryRank) {
  int partly = 0;
  for (int64_t half_gib = 16; half_gib < 64; ++half_gib) {
    Case c{.spec = llama_8b(), .device = DeviceType::kCuda};
    c.machine = gpu_machine("H100");
    c.machine.gpus.front().memory_bytes = half_gib * 512 * kMiB;
    c.world = {8, 1};
    c.config.optimizer.name = Rules::id<Muon>();
    c.config.zero.stage = 3;
    c.config.train.global_batch = 8;
    c.config.train.micro_batch = 1;
    c.config.train.recompute = Recompute::kBlock;
    c.config.data.max_length = 1024;
    stay_near(c.config);
    c.config.offload.optimizer = OffloadTier::kHost;
    if (!c.draft().fits) continue;
    c.config.offload.optimizer = OffloadTier::kAuto;
    const Plan plan = c.draft();
    EXPECT_TRUE(plan.fits) << half_gib / 2.0 << " GiB\n" << print_plan(plan);
    const std::vector<char>& off = plan.placement.pool(Pool::kOptimizer).off_device;
    const auto count = std::ranges::count(off, 1);
    partly += count > 0 && count < std::ssize(off) ? 1 : 0;
  }
  EXPECT_GT(partly, 0);
}

// What the GPU does not have begins in the middle of the blocks, and so does what host memory does not have.
TEST(ShardsPlan, HostMemoryHasRoomForTheRankWithMostOfItsBlocks) {
  int uneven = 0;
  for (int64_t quarter_gib = 20; quarter_gib < 34; ++quarter_gib) {
    Case c{.spec = llama_8b(), .device = DeviceType::kCuda};
    c.machine = gpu_machine("H100");
    c.machine.gpus.front().memory_bytes = 14 * kGiB;
    c.machine.host_memory = c.machine.host_available = quarter_gib * 256 * kMiB;
    c.machine.disks = {{"/swap", 1'000 * kGiB, 2e9, 1e9}};
    c.world = {8, 1};
    c.config.optimizer.name = Rules::id<Muon>();
    c.config.zero.stage = 3;
    c.config.train.global_batch = 8;
    c.config.train.micro_batch = 1;
    c.config.train.recompute = Recompute::kBlock;
    c.config.data.max_length = 1024;
    stay_near(c.config);
    c.config.offload.optimizer = OffloadTier::kAuto;
    c.config.offload.paths = {"/swap"};
    const Plan plan = c.draft();
    EXPECT_TRUE(plan.fits) << static_cast<double>(quarter_gib) / 4 << " GiB\n" << print_plan(plan);
    uneven += bytes_at(plan, "longest shards", TierId::kHost) > 64 * kMiB ? 1 : 0;
  }
  EXPECT_GT(uneven, 0);
}

// Whoever fetches a shard reads it and no more; an update reads nothing that a gather would not have read.
TEST(ShardsPlan, TheDiskMovesShardsAlone) {
  for (const int ranks : {1, 2, 4}) {
    for (const int64_t stage : {2, 3}) {
      const Plan plan = on_disk(stage, ranks).plan();
      double read = 0, written = 0;
      const std::vector<StepSchedule> steps = steady_steps(plan.step);
      for (const Operation& op : steps.back().operations) {
        if (!is_transfer(op)) continue;
        const PoolPlan& pool = plan.placement.pool(op.pool);
        if (pool.shards > 1) continue;
        const auto bytes = static_cast<double>(pool.bytes[static_cast<size_t>(op.array)]);
        if (op.kind == OperationKind::kFetch) read += bytes;
        if (op.kind == OperationKind::kWriteBack) written += bytes;
      }
      EXPECT_GT(read, 0);
      EXPECT_NEAR(plan.timeline.disk_read_bytes / read, 1, 1e-9) << ranks << " ranks, stage " << stage;
      EXPECT_NEAR(plan.timeline.disk_written_bytes / written, 1, 1e-9) << ranks << " ranks, stage " << stage;
    }
  }
  const double one = on_disk(3, 1).plan().timeline.disk_read_bytes;
  for (const int ranks : {2, 4}) {
    const Timeline timeline = on_disk(3, ranks).plan().timeline;
    // Forward, backward and update, of which one finds the shard in its slot or none does.
    EXPECT_LT(timeline.disk_read_bytes * ranks, 1.6 * one) << ranks;
    EXPECT_LT(timeline.disk_written_bytes * ranks, 1.1 * on_disk(3, 1).plan().timeline.disk_written_bytes);
  }
}

// Gathers are those of shards on the device: the tier adds its link, and no call.
TEST(ShardsPlan, RanksSendAsMuchWhereverTheirShardsAre) {
  for (const bool lora : {false, true}) {
    Case far = on_disk(3, 4), near = far;
    near.config.offload.weights = near.config.offload.gradients = OffloadTier::kNone;
    if (lora) far.config.train.method = near.config.train.method = Method::kLora;
    EXPECT_EQ(far.plan().traffic.bytes(), near.plan().traffic.bytes());
  }
}

TEST(ShardsPlan, GpusHaveShardsInHostMemory) {
  for (const bool lora : {false, true}) {
    Case c = on_disk(3, 8);
    c.spec = llama_8b();
    c.device = DeviceType::kCuda;
    c.machine = gpu_machine("H100");
    c.config.offload.weights = OffloadTier::kHost;
    c.config.offload.gradients = OffloadTier::kNone;
    if (lora) c.config.train.method = Method::kLora;
    const Plan plan = c.draft();
    const char* const name = lora ? "frozen weights" : "weights";
    const ModelLayout layout = c.layout(nullptr);
    const int64_t here = layout.blocks.front().flat_elements;
    const auto share = static_cast<double>((layout.flat_elements - here) * 2) / 8;
    EXPECT_NEAR(static_cast<double>(bytes_at(plan, name, TierId::kHost)) / share, 1, 0.01);
    EXPECT_LT(bytes_at(plan, name, TierId::kDevice), kMiB);
    EXPECT_GT(plan.timeline.link_bytes, 1.5 * share);
    EXPECT_LT(plan.timeline.link_bytes, 6 * share + 2.0 * static_cast<double>(here) * 2);
  }
}

// A 70B at stage 3 on two machines of eight GPUs, each with 2,000 GiB of host memory.
TEST(ShardsPlan, SeventyBillionFitInSixteenShards) {
  for (const bool told : {false, true}) {
    Case c{.spec = make_spec({8192, 28672, 80, 64, 8, 128, 128256}, false), .device = DeviceType::kCuda};
    Machine node = gpu_machine("H100");
    node.gpus.front().memory_bytes = 80 * kGiB;
    node.host_memory = int64_t{2000} * kGiB;
    c.machine = share_of_machine(node, 8);
    c.world = {16, 2};
    c.config.zero.stage = 3;
    c.config.train.global_batch = 512;
    c.config.data.max_length = 4096;
    if (told) c.config.offload.weights = c.config.offload.optimizer = OffloadTier::kHost;
    const Plan plan = c.draft();
    EXPECT_TRUE(plan.fits) << print_plan(plan);
    EXPECT_FALSE(plan.placement.in_backward());
    if (told) {
      EXPECT_LT(bytes_at(plan, "weights", TierId::kHost), 10 * kGiB) << print_plan(plan);
    }
  }
}

// Of many micro-batches' block inputs and shards of gradients not both fit: groups of some, and whole
// gradients on the disk.
TEST(ShardsPlan, SmallerGroupsKeepGradientsWhole) {
  Case c = on_disk(2, 2);
  c.config.offload.weights = OffloadTier::kNone;
  c.config.train.global_batch = 512;
  const Plan wide = c.plan();
  ASSERT_GT(wide.placement.pool(Pool::kGradients).shards, 1);
  EXPECT_EQ(wide.placement.group, wide.numerics.micro_batches);
  for (const Tier& tier : wide.tiers) {
    if (tier.tier_id == TierId::kHost) c.machine.host_memory = (tier.bytes - 2 * kGiB) * 10 / 9;
  }
  c.config.offload.optimizer = OffloadTier::kNone;
  const Plan narrow = c.plan();
  EXPECT_EQ(narrow.placement.pool(Pool::kGradients).shards, 1);
  EXPECT_LT(narrow.placement.group, narrow.numerics.micro_batches);
}

// The same clocks for one rank and for all.
TEST(ShardsPlan, TheCostModelAgreesWithTheSimulation) {
  for (const int ranks : {2, 6}) {
    for (int which = 0; which < 3; ++which) {
      Case c = on_disk(3, ranks);
      c.spec = smollm2_135m();
      c.machine.disks = {{"/swap", 1'000 * kGiB, 2e8, 1e8}};
      if (which == 1) c.config.train.method = Method::kLora;
      if (which == 2) {
        c.config.offload.weights = c.config.offload.gradients = OffloadTier::kHost;
        c.machine = gpu_machine("H100");
        c.device = DeviceType::kCuda;
      }
      const AdapterSpec lora = adapter_r16();
      const AdapterSpec* adapter = which == 1 ? &lora : nullptr;
      const ModelLayout layout = c.layout(adapter);
      const PlanInputs inputs{c.config, c.spec, adapter, layout, c.device, {}, {}, nullptr};
      const Plan plan = draft_plan(inputs, c.machine, c.world);
      ASSERT_TRUE(plan.step.moves_shards());
      const Simulation simulation = simulate_step(inputs, c.machine, plan, {});
      EXPECT_NEAR(plan.step_seconds / simulation.seconds, 1, 0.02) << ranks << " ranks, " << which;
      EXPECT_GE(plan.step_seconds, simulation.bound * 0.999) << ranks << " ranks, " << which;
    }
  }
}

// The plan keeps blocks in memory until what is free has no room for another one, of which each rank has
// half.
TEST(ShardsPlan, OneCopyOfWhatIsFrozenLeavesRoomForMoreOfIt) {
  int partly = 0;
  for (int64_t gib = 4; gib <= 24; ++gib) {
    Case c{.spec = llama_8b(), .machine = cpu_machine(gib), .world = {.ranks = 2}};
    c.config.train.method = Method::kLora;
    c.config.train.global_batch = 16, c.config.train.micro_batch = 1;
    c.config.train.recompute = Recompute::kBlock;
    c.config.offload.paths = {"d"};
    c.machine.disks = {{"d", int64_t{1} << 40, 3e9, 2e9, 4e9}};
    const Plan plan = c.draft();
    const PoolPlan& weights = plan.placement.pool(Pool::kWeights);
    const auto off = std::ranges::count(weights.off_device, 1);
    const auto all = std::ranges::count_if(weights.bytes, [](int64_t bytes) { return bytes > 0; });
    if (!plan.fits || off == 0 || off == all) continue;
    ++partly;
    const Tier& host = plan.tiers.front();
    const int64_t next = std::ranges::max(weights.bytes) / 2, margin = 64 * kMiB;
    EXPECT_LE(host.usable - host.bytes, next + margin + kMiB) << gib;
  }
  EXPECT_GT(partly, 0);
}

}  // namespace
}  // namespace lm
