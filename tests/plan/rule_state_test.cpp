// What the optimizer's state takes: the streams of its rule, coded or not.
#include <gtest/gtest.h>

#include "base/bytes.h"
#include "plan/plan.h"
#include "shapes.h"

namespace lm {
namespace {

TEST(Plan, HasTheStateTensorsOfItsRule) {
  Case c;
  const int64_t flat = c.layout(nullptr).flat_elements;
  c.config.optimizer.name = Rules::id<Sgd>();
  const Plan plan = c.plan();
  EXPECT_EQ(class_bytes(plan, "momentum"), flat * 4);
  EXPECT_EQ(class_bytes(plan, "master"), flat * 2);
  EXPECT_EQ(class_bytes(plan, "second moment"), -1);
  EXPECT_EQ(plan.placement.granule_bytes, 4096 * 6);
  Case adamw;
  EXPECT_EQ(adamw.plan().peak.host - plan.peak.host, flat * 4);
}

TEST(Plan, SgdWithoutMomentumTakesNothing) {
  Case c;
  c.config.optimizer.name = Rules::id<Sgd>();
  c.config.optimizer.rule.of<Sgd>().momentum = 0;
  const int64_t flat = c.layout(nullptr).flat_elements;
  Plan plan = c.plan();
  EXPECT_EQ(class_bytes(plan, "momentum"), -1);
  EXPECT_EQ(class_bytes(plan, "master"), flat * 2);
  EXPECT_EQ(plan.placement.granule_bytes, 4096 * 2);
  // Of no bytes at all nothing is offloaded.
  c.config.optimizer.master = Master::kNone;
  c.config.offload.optimizer = OffloadTier::kNvme;
  c.config.offload.paths = {"/swap"};
  c.machine.disks = {{.path = "/swap", .free_bytes = int64_t{1} << 34}};
  plan = c.plan();
  EXPECT_EQ(class_bytes(plan, "master"), -1);
  EXPECT_EQ(plan.placement.granule_bytes, 0);
  EXPECT_EQ(plan.placement.pool(Pool::kOptimizer).slots, 0);
}

TEST(Plan, Bf16StateTakesTwoBytesAndHasNoMaster) {
  Case c;
  const int64_t flat = c.layout(nullptr).flat_elements;
  for (const Master master : {Master::kSplit, Master::kF32, Master::kNone}) {  // whatever it says
    c.config.optimizer.master = master;
    c.config.optimizer.name = Rules::id<AdamWBf16>();
    Plan plan = c.plan();
    EXPECT_EQ(class_bytes(plan, "first moment"), flat * 2);
    EXPECT_EQ(class_bytes(plan, "second moment"), flat * 2);
    EXPECT_EQ(class_bytes(plan, "master"), -1);
    EXPECT_EQ(plan.placement.granule_bytes, 4096 * 4);
    c.config.optimizer.name = Rules::id<AdamWAnyPrecision>();
    plan = c.plan();
    EXPECT_EQ(class_bytes(plan, "compensation"), flat * 2);
    EXPECT_EQ(class_bytes(plan, "master"), -1);
    EXPECT_EQ(plan.placement.granule_bytes, 4096 * 6);
  }
}

TEST(Plan, CodedStateTakesAByteAndItsShareOfAScale) {
  Case c;
  c.config.optimizer.name = Rules::id<AdamW8bit>();
  int64_t small = 0, all = 0;
  const ModelLayout layout = c.layout(nullptr);
  for (const BlockLayout& block : layout.blocks) {
    all += block.flat_elements;
    // Norms alone are small here, behind each other and filled up to a granule.
    for (const DecayRange& range : block.ranges) small += range.decay ? 0 : range.elements;
  }
  EXPECT_GT(small, 0);
  const Plan plan = c.plan();
  for (const char* moment : {"first moment", "second moment"})
    EXPECT_EQ(class_bytes(plan, moment), (all - small) / 256 * 260 + small * 4) << moment;
}

TEST(Plan, FactoredStateIsOfRowsColumnsAndVectors) {
  Case c;
  const ModelLayout layout = c.layout(nullptr);
  Elements all;
  for (const BlockLayout& block : layout.blocks) {
    const Elements here = block.count(0, block.flat_elements);
    all.rows += here.rows, all.columns += here.columns, all.vectors += here.vectors;
  }
  // Of the embedding and of 30 blocks with q, k, v, o, gate, up and down: of 576 columns, or of 1536.
  EXPECT_EQ(all.rows, 49152 + 30 * (576 + 192 + 192 + 576 + 2 * 1536 + 576));
  EXPECT_EQ(all.columns, 576 + 30 * (4 * 576 + 2 * 576 + 1536));
  c.config.optimizer.name = Rules::id<Adafactor>();
  EXPECT_EQ(class_bytes(c.plan(), "second moment"), (all.rows + all.columns + all.vectors) * 4);
  // Rows' three numbers, columns' one and 64 sums of parts, and the step: of the embedding.
  EXPECT_EQ(class_bytes(c.plan(), "sums"), 4 * (4 + 3 * 49152 + 65 * 576));
  c.config.optimizer.name = Rules::id<AdafactorLowmem>();
  EXPECT_EQ(class_bytes(c.plan(), "second moment"), (all.rows + all.columns + all.vectors) * 2);
}

TEST(Plan, MuonStateIsAMomentumAndOfTheRestASecondMoment) {
  Case c;
  const ModelLayout layout = c.layout(nullptr);
  int64_t outside = layout.blocks.front().flat_elements + layout.blocks.back().flat_elements;
  for (size_t b = 1; b + 1 < layout.blocks.size(); ++b)
    outside += layout.blocks[b].count(0, layout.blocks[b].flat_elements).vectors;
  const double before = c.plan().estimate.cost.gemm_flops;
  c.config.optimizer.name = Rules::id<Muon>();
  const Plan plan = c.plan();
  EXPECT_EQ(class_bytes(plan, "momentum"), layout.flat_elements * 4);
  EXPECT_EQ(class_bytes(plan, "second moment"), outside * 4);
  // Of gate, up or down: itself twice in bf16, two squares of its shorter side, sums of 216 granules, a norm.
  EXPECT_EQ(class_bytes(plan, "products"),
            2 * 2 * 1536 * 576 + 2 * 2 * 576 * 576 + round_up(216 * 8, 512) + 512);
  // Five times three products of each matrix, of whose sides the shorter one counts twice.
  const auto of = [](double shorter, double longer) {
    return 5 * 2 * (2 * shorter * shorter * longer + shorter * shorter * shorter);
  };
  EXPECT_DOUBLE_EQ(plan.estimate.cost.gemm_flops - before,
                   30 * (2 * of(576, 576) + 2 * of(192, 576) + 3 * of(576, 1536)));
}

// Keys and values of virtual tokens are no matrix that multiplies: all of them are AdamW's, as embeddings.
TEST(Plan, OfAPrefixOrthogonalStateIsAdamWs) {
  Case c;
  const AdapterSpec prefix{.targets = {}, .kind = AdapterKind::kPrefix, .virtual_tokens = 20};
  const ModelLayout layout = c.layout(&prefix);
  c.config.train.method = Method::kPrefix;
  const auto planned = [&](RuleId rule) {
    c.config.optimizer.name = rule;
    return make_plan({c.config, c.spec, &prefix, layout, c.device}, c.machine);
  };
  const Plan adamw = planned(Rules::id<AdamW>()), muon = planned(Rules::id<Muon>());
  EXPECT_GT(layout.flat_elements, 0);
  EXPECT_EQ(class_bytes(muon, "momentum"), layout.flat_elements * 4);
  EXPECT_EQ(class_bytes(muon, "second moment"), layout.flat_elements * 4);
  EXPECT_EQ(class_bytes(muon, "products"), -1);
  EXPECT_EQ(muon.estimate.cost.gemm_flops, adamw.estimate.cost.gemm_flops);
}

// The embedding's update is no product: its state passes by in tiles, as with any rule.
TEST(Plan, OfMuonTheBlocksAloneAreNotCut) {
  Case c{.spec = make_spec({64, 160, 2, 4, 2, 16, 20000}, false),
         .machine = gpu_machine("4090"),
         .device = DeviceType::kCuda};
  c.config.optimizer.name = Rules::id<Muon>();
  c.config.offload.optimizer = OffloadTier::kHost;
  c.config.io.tile = ByteSize{64 << 10};
  const Plan plan = c.plan();
  const PlacementPlan& p = plan.placement;
  const ModelLayout layout = c.layout(nullptr);
  const auto tiles = [&](size_t block) { return p.first_tile[block + 1] - p.first_tile[block]; };
  EXPECT_EQ(tiles(1), 1);
  EXPECT_EQ(tiles(2), 1);
  EXPECT_GT(tiles(0), 10);
  EXPECT_GT(tiles(3), 10);
  EXPECT_EQ(p.tile_granules * kGranule, layout.blocks[1].flat_elements);
  // Its products are those of the GPU, wherever the state is.
  EXPECT_FALSE(p.update_on_host);
  const auto said = std::ranges::find(plan.choices, "update of state off the GPU", &Choice::key);
  ASSERT_NE(said, plan.choices.end());
  EXPECT_EQ(said->reason, "products have other bits on the CPU");
}

TEST(Plan, CodesOfFourBitsTakeHalfAByteAndTheirShareOfAScale) {
  Case c;
  c.config.optimizer.name = Rules::id<AdamW4bit>();
  Elements all;
  for (const BlockLayout& block : c.layout(nullptr).blocks) {
    const Elements here = block.count(0, block.flat_elements);
    all.all += here.all, all.small += here.small;
  }
  for (const char* moment : {"first moment", "second moment"})
    EXPECT_EQ(class_bytes(c.plan(), moment), all.large() / 128 * 68 + all.small * 4) << moment;
  c.config.optimizer.name = Rules::id<AdamWFp8>();
  EXPECT_EQ(class_bytes(c.plan(), "first moment"), all.large() / 256 * 260 + all.small * 4);
}

// Of state that is a few bytes per thousand weights, a tile by its bytes would be of more weights than there
// are: what the CPU's update stages is never of more than a unit.
TEST(Plan, StagesNoMoreThanAUnitForTheCpusUpdate) {
  Case c{.spec = llama_1b(), .machine = gpu_machine("4090"), .device = DeviceType::kCuda};
  c.config.optimizer.name = Rules::id<AdafactorLowmem>();
  c.config.optimizer.master = Master::kNone;
  c.config.offload.optimizer = OffloadTier::kHost;
  c.machine.memory_bandwidth = 400e9;
  c.machine.host_memory = 256LL << 30;
  const Plan plan = c.plan();
  int64_t longest = 0;
  for (const Unit& unit : c.layout(nullptr).units(false)) longest = std::max(longest, unit.elements);
  EXPECT_EQ(plan.placement.tile_granules * kGranule, longest);
  EXPECT_LE(plan.placement.update_staging, 3 * longest * 6);
}

// A rule that updates whole tensors has a rank's state of a unit in one tile, and a head that is not cut.
TEST(Plan, WholeTensorsAreNotCut) {
  Case c{.spec = make_spec({64, 160, 2, 4, 2, 16, 20000}, false)};
  c.config.optimizer.name = Rules::id<Adafactor>();
  c.config.offload.paths = {"/swap"};
  c.config.offload.optimizer = c.config.offload.weights = c.config.offload.gradients = OffloadTier::kNvme;
  c.config.io.tile = ByteSize{4096};
  c.machine.disks = {{.path = "/swap", .free_bytes = int64_t{1} << 34}};
  const ModelLayout layout = c.layout(nullptr);
  const Plan plan = make_plan({c.config, c.spec, nullptr, layout, c.device}, c.machine, {.ranks = 2});
  const PlacementPlan& p = plan.placement;
  EXPECT_EQ(p.head_segments(), 0);
  EXPECT_TRUE(p.sharded);
  ASSERT_EQ(p.granules.size(), layout.blocks.size());
  const Sharding sharding{2, 2, WholeTensors::kAll};
  EXPECT_EQ(p.sharding(), sharding);
  int64_t longest = 0;
  for (const Unit& unit : layout.units(false)) {
    const auto b = static_cast<size_t>(unit.block);
    const auto bytes = [&](const Shard& shard) {
      return plan.numerics.state().bytes(layout.blocks[b].count(shard.first, shard.end()));
    };
    const Shard first = shard_of(unit, sharding, 0);
    EXPECT_EQ(p.first_granule[b] * kGranule, first.first);
    EXPECT_EQ(p.granules[b] * kGranule, first.elements);
    EXPECT_EQ(p.pool(Pool::kOptimizer).bytes[b], std::max<int64_t>(bytes(first), 1));
    for (const int place : {0, 1}) longest = std::max(longest, bytes(shard_of(unit, sharding, place)));
  }
  // The head's matrix is the second rank's, whose slots are no shorter than it.
  EXPECT_GE(p.pool(Pool::kOptimizer).slot_bytes, longest);
  // Of adapters nothing is as large, and the frozen head is cut.
  c.config.optimizer.name = Rules::id<AdamW>();
  EXPECT_GT(make_plan({c.config, c.spec, nullptr, layout, c.device}, c.machine, {.ranks = 2})
                .placement.head_segments(),
            0);
}

// Shards of some ranks have the small tensors, whose state takes four times as much.
TEST(Plan, ATileHasRoomForTheMostOfAllRanks) {
  Case c{.spec = make_spec({64, 160, 2, 4, 2, 16, 300})};
  c.config.optimizer.name = Rules::id<AdamW8bit>();
  c.config.optimizer.master = Master::kNone;
  c.config.offload.paths = {"/swap"};
  c.config.offload.optimizer = OffloadTier::kNvme;
  c.machine.disks = {{.path = "/swap", .free_bytes = int64_t{1} << 34}};
  const ModelLayout layout = c.layout(nullptr);
  const int ranks = 3;
  bool other = false;    // a rank that is not the first needs most
  bool unequal = false;  // a tile takes other bytes than the one before it in its unit, which is as long
  for (const std::optional<ByteSize> tile : {std::optional<ByteSize>(), {ByteSize{4096}}}) {
    c.config.io.tile = tile;
    const Plan plan = make_plan({c.config, c.spec, nullptr, layout, c.device}, c.machine, {.ranks = ranks});
    const PlacementPlan& p = plan.placement;
    const std::vector<int64_t>& bytes = p.pool(Pool::kOptimizer).bytes;
    ASSERT_TRUE(p.sharded);
    for (const Unit& unit : layout.units(p.head_segments() > 0)) {
      const auto begin = static_cast<size_t>(p.first_tile[static_cast<size_t>(unit.block)]);
      const auto end = static_cast<size_t>(p.first_tile[static_cast<size_t>(unit.block) + 1]);
      for (size_t a = begin; a < end; ++a) {
        std::vector<int64_t> of_rank;
        for (int rank = 0; rank < ranks; ++rank) {
          const Shard shard = shard_of(unit, rank, ranks), first = shard_of(unit, 0, ranks);
          const int64_t from =
              std::min(shard.first + p.first_granule[a] * kGranule - first.first, shard.end());
          const int64_t to = std::min(from + p.granules[a] * kGranule, shard.end());
          const BlockLayout& block = layout.blocks[static_cast<size_t>(unit.block)];
          of_rank.push_back(plan.numerics.state().bytes(block.count(from, to)));
        }
        const int64_t most = std::ranges::max(of_rank);
        EXPECT_EQ(bytes[a], most) << "tile " << a;
        other = other || most > of_rank.front();
        unequal = unequal || (a > begin && p.granules[a] == p.granules[a - 1] && most != bytes[a - 1]);
      }
    }
  }
  EXPECT_TRUE(other);
  EXPECT_TRUE(unequal);
}

}  // namespace
}  // namespace lm
