// Plans of experts that are divided among ranks: their bytes, what ranks send, and what is refused.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "base/bytes.h"
#include "base/error.h"
#include "model/expert_exchange.h"
#include "plan/limits.h"
#include "plan/parallel_experts.h"
#include "plan/planned_layout.h"
#include "plan/scaling.h"
#include "plan/sizes.h"
#include "plan/weight_rows.h"
#include "plan/what_if.h"
#include "shapes.h"
#include "spec/families/experts.h"

namespace lm {
namespace {

constexpr int64_t kExperts = 16, kChosen = 4, kFfn = 96, kHidden = 256, kLayers = 4;

Case experts_case(int ranks, bool parallel = true) {
  Case c{.spec = make_spec({kHidden, 512, kLayers, 4, 2, 64, 4096}), .machine = cpu_machine(16)};
  c.spec.names = families::expert_names();
  for (LayerSpec& layer : c.spec.layers)
    layer.sublayers[1].mixer =
        ExpertsSpec{.experts = kExperts, .chosen = kChosen, .ffn = kFfn, .renormalise = true};
  c.lora.targets = resolve_targets(c.spec.names, {"all-linear"}, "test");
  c.config.train.method = Method::kLora;
  c.config.train.micro_batch = 2;
  c.config.train.global_batch = 16;
  c.config.train.recompute = Recompute::kNone;
  c.config.zero.experts = parallel ? ZeroExperts::kParallel : ZeroExperts::kReplicated;
  c.world.ranks = ranks;
  c.world.nodes = ranks;  // of one rank each: nobody has anything in common
  return c;
}

std::string refusal(const Case& c) {
  try {
    // The layout comes after the refusal, as in a run.
    const AdapterSpec* adapter = c.config.train.method == Method::kLora ? &c.lora : nullptr;
    const ModelLayout whole = planned_layout(c.config, c.spec, adapter, {});
    refuse_parallel_experts({c.config, c.spec, adapter, whole, c.device}, c.world);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kConfig);
    EXPECT_NE(error.text().advice(), "");
    return error.what();
  }
  return "";
}

TEST(ParallelExpertsPlan, EachRankHasItsPartOfTheirMemory) {
  const int64_t all = class_bytes(experts_case(2, false).plan(), "frozen experts");
  ASSERT_GT(all, 0);
  for (const int ranks : {1, 2, 4}) {
    const Plan plan = experts_case(ranks).plan(), whole = experts_case(ranks, false).plan();
    EXPECT_EQ(class_bytes(plan, "frozen experts"), all / ranks) << ranks;
    EXPECT_EQ(class_bytes(plan, "frozen weights"), class_bytes(whole, "frozen weights"));
    EXPECT_EQ(class_bytes(plan, "weights"), class_bytes(whole, "weights"));
    EXPECT_EQ(class_bytes(plan, "rows of experts"), ranks == 1 ? -1 : kExpertRoundBytes);
  }
}

// Ranks of one machine have their frozen weights in common only if these are the same.
TEST(ParallelExpertsPlan, NothingIsInCommon) {
  Case c = experts_case(2, false);
  c.world.nodes = 1;
  EXPECT_EQ(c.plan().placement.frozen_sharers, 2);
  c.config.zero.experts = ZeroExperts::kParallel;
  EXPECT_EQ(c.plan().placement.frozen_sharers, 1);
}

// Of what is no expert stage 3 has shards, and gathers these. A rank's experts stay, and are in no slot.
TEST(ParallelExpertsPlan, BesideShardsOfAllWeightsExpertsAreNotGathered) {
  for (const int ranks : {2, 4}) {
    Case c = experts_case(ranks), all = experts_case(ranks, false), below = experts_case(ranks);
    c.config.zero.stage = all.config.zero.stage = 3;
    const Plan plan = c.plan(), replicated = all.plan(), two = below.plan();
    EXPECT_EQ(class_bytes(plan, "frozen experts"), class_bytes(two, "frozen experts"));
    EXPECT_LT(class_bytes(plan, "frozen weights"), class_bytes(two, "frozen weights"));
    EXPECT_EQ(plan.traffic.expert_bytes, two.traffic.expert_bytes);
    const ModelLayout layout = c.layout(&c.lora);
    int64_t slot = 0;
    for (const BlockLayout& block : layout.blocks) {
      slot = std::max(slot, block.body ? block.frozen_bytes - block.own_bytes : 0);
      EXPECT_EQ(block.own_bytes, expert_bytes(block).frozen);
    }
    EXPECT_EQ(plan.placement.pool(Pool::kWeights).slot_bytes, round_up(slot, kSlotAlignment));
    // Gathered forward and backward in every micro-batch: of attention and routers alone.
    EXPECT_LT(plan.traffic.weight_bytes, 0.2 * replicated.traffic.weight_bytes);
    EXPECT_LT(plan.peak.host, replicated.peak.host);
  }
}

// Off the device a rank has its part of them, and reads those that any rank's tokens meet.
TEST(ParallelExpertsPlan, TheyAreOffloadedWithTheRestOfTheirBlocks) {
  Case c = experts_case(2);
  c.config.offload.weights = OffloadTier::kNvme;
  c.config.offload.paths = {"d"};
  c.machine.disks = {{"d", int64_t{1} << 40, 3e9, 2e9, 4e9}};
  const Plan plan = c.plan();
  const ModelLayout layout = c.layout(&c.lora);
  for (size_t unit = 1; unit <= kLayers; ++unit)
    EXPECT_EQ(plan.placement.pool(Pool::kWeights).bytes[unit], layout.blocks[unit].frozen_bytes);
  EXPECT_GT(class_bytes(experts_case(2).plan(), "frozen experts"), 0);
  EXPECT_EQ(class_bytes(plan, "frozen experts"), 0) << "not in memory";
  // With 16 experts of which a token takes 4, two tokens of one rank meet less than half, those of two more.
  const auto& spec = *c.spec.layer(0).find<ExpertsSpec>();
  Case two = c;
  two.config.data.max_length = 2;
  two.config.train.micro_batch = 1;
  const Plan few = two.plan();
  EXPECT_TRUE(routes_experts(few, 1, spec, {}));
  EXPECT_FALSE(routes_experts(few, 1, spec, {2, 0}));
}

TEST(ParallelExpertsPlan, CountsTheRowsThatMove) {
  for (const int ranks : {2, 4}) {
    const Case c = experts_case(ranks);
    const Plan plan = c.plan(), whole = experts_case(ranks, false).plan();
    EXPECT_EQ(whole.traffic.expert_bytes, 0);
    // Of a rank, in all its micro-batches: forward sends rows and gets them back, backward sends two of each
    // with a weight, and gets one with a number.
    const double tokens = static_cast<double>(16 / ranks * c.config.data.max_length);
    const double row = kHidden * 2, slots = tokens * kChosen * kLayers;
    const double counts = kExperts * 4 * (ranks - 1) * 16.0 / ranks / 2 * kLayers;
    const double expected = slots * (ranks - 1) / ranks * (5 * row + 2 * 4) + counts;
    EXPECT_NEAR(plan.traffic.expert_bytes, expected, 0.01 * expected) << ranks;
    EXPECT_GT(plan.traffic.calls, whole.traffic.calls);
    EXPECT_GT(plan.step_seconds, whole.step_seconds);
    const auto said = std::ranges::find(plan.choices, std::string("zero.experts"), &Choice::key);
    ASSERT_NE(said, plan.choices.end());
    EXPECT_NE(said->reason.find(ranks == 2 ? "keeps 8 experts" : "keeps 4 experts"), std::string::npos)
        << said->reason;
  }
}

// Owners multiply by gate_up once more; a token still meets as many experts.
TEST(ParallelExpertsPlan, TheirWorkIsThatOfAllExpertsAndARecomputation) {
  const Plan plan = experts_case(4).plan(), whole = experts_case(4, false).plan();
  EXPECT_DOUBLE_EQ(plan.peak_seconds_per_token, whole.peak_seconds_per_token);
  EXPECT_GT(plan.estimate.cost.gemm_flops, 1.02 * whole.estimate.cost.gemm_flops);
  EXPECT_LT(plan.estimate.cost.gemm_flops, 1.2 * whole.estimate.cost.gemm_flops);
}

TEST(ParallelExpertsPlan, OtherNumbersOfRanksHaveTheirParts) {
  const Case c = experts_case(8);
  const AdapterSpec* const adapter = &c.lora;
  const ModelLayout layout = c.layout(adapter);
  Machine node = c.machine;
  const Scaling scaling =
      estimate_scaling({c.config, c.spec, adapter, layout, c.device}, node, {.ranks = 8, .nodes = 8});
  ASSERT_GE(scaling.rows.size(), 3U);
  for (const ScalingRow& row : scaling.rows) {
    EXPECT_EQ(kExperts % row.world.ranks, 0);
    Case alone = experts_case(row.world.ranks);
    alone.world = row.world;
    EXPECT_EQ(row.peak.host, alone.draft().peak.host) << row.world.ranks;
  }
}

// After a rank was killed for memory.
TEST(ParallelExpertsPlan, SettingsThatSaveMemoryAreOfAllRanks) {
  const Case c = experts_case(2);
  const AdapterSpec* const adapter = &c.lora;
  const ModelLayout layout = c.layout(adapter);
  const PlanInputs inputs{c.config, c.spec, adapter, layout, c.device};
  EXPECT_NE(less_memory(inputs, c.machine, c.world, TierId::kHost), "");
}

// Where experts are most of the memory it is among what saves most; where it is refused it is not named.
TEST(ParallelExpertsPlan, DividingThemIsAdvisedWhereItCanBeDone) {
  const auto advice = [](int ranks, const std::function<void(Case&)>& change) {
    Case c = experts_case(ranks, false);
    c.config.train.micro_batch = 1;  // little beside the experts
    c.config.train.recompute = Recompute::kBlock;
    c.config.data.max_length = 64;
    change(c);
    const AdapterSpec* const adapter = c.config.train.method == Method::kLora ? &c.lora : nullptr;
    const ModelLayout layout = c.layout(adapter);
    const PlanInputs inputs{c.config, c.spec, adapter, layout, c.device};
    return less_memory(inputs, c.machine, c.world, TierId::kHost);
  };
  constexpr const char* kKey = "zero.experts = \"parallel\"";
  const auto nothing = [](Case&) {};
  for (const int ranks : {2, 4})
    EXPECT_NE(advice(ranks, nothing).find(kKey), std::string::npos) << advice(ranks, nothing);
  for (const int ranks : {1, 3}) EXPECT_EQ(advice(ranks, nothing).find(kKey), std::string::npos) << ranks;
  for (const std::function<void(Case&)>& change : std::vector<std::function<void(Case&)>>{
           [](Case& c) { c.config.train.method = Method::kFull; },
           [](Case& c) { c.config.zero.experts = ZeroExperts::kParallel; },
           [](Case& c) {
             c.spec = make_spec({kHidden, 512, kLayers, 4, 2, 64, 4096});
           }})
    EXPECT_EQ(advice(2, change).find(kKey), std::string::npos);
}

TEST(ParallelExpertsPlan, RefusesWhatItCannotDo) {
  EXPECT_EQ(refusal(experts_case(4)), "");
  Case c = experts_case(3);
  EXPECT_NE(refusal(c).find("3 ranks do not divide 16 experts"), std::string::npos) << refusal(c);
  c = experts_case(2);
  c.spec = make_spec({kHidden, 512, kLayers, 4, 2, 64, 4096});
  EXPECT_NE(refusal(c).find("has no experts"), std::string::npos) << refusal(c);
  c = experts_case(2);
  c.device = DeviceType::kCuda;
  EXPECT_EQ(refusal(c), "");
  c = experts_case(2);
  c.config.zero.stage = 3;
  EXPECT_EQ(refusal(c), "");
  c = experts_case(2);
  c.config.offload.weights = OffloadTier::kNvme;
  EXPECT_EQ(refusal(c), "");
  c.config.zero.stage = 3;
  EXPECT_NE(refusal(c).find("offload.weights = \"nvme\""), std::string::npos) << refusal(c);
  c = experts_case(2);
  c.config.train.method = Method::kFull;
  EXPECT_NE(refusal(c).find("train.method"), std::string::npos) << refusal(c);
  c = experts_case(2);
  c.spec.names.experts = "mlp.experts";
  c.lora.targets = {"q_proj", "experts.gate_up_proj", "experts.down_proj"};
  EXPECT_EQ(refusal(c), "") << "every rank has their pairs";
  // Replicated ones are refused nothing of it.
  for (Case any : {experts_case(3, false), experts_case(2, false)}) {
    any.config.zero.stage = 3;
    EXPECT_EQ(refusal(any), "");
  }
}

// What a plan asks itself about other settings is refused likewise.
TEST(ParallelExpertsPlan, OtherWaysAreThoseThatCanBe) {
  Case c = experts_case(2);
  c.config.train.method = Method::kFull;
  EXPECT_THROW(c.plan(), Error);
  c.config.train.method = Method::kLora;
  c.config.offload.weights = OffloadTier::kAuto;
  const Plan plan = c.plan();
  EXPECT_EQ(plan.placement.pool(Pool::kWeights).slots, 0) << "experts stay in memory";
}

}  // namespace
}  // namespace lm
