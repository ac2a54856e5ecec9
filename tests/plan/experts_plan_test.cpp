// Plans of mixtures of experts: all experts take memory, and those that a token meets take time, on a GPU in
// a few launches.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "base/bytes.h"
#include "base/error.h"
#include "plan/cost_model.h"
#include "plan/estimate.h"
#include "plan/limits.h"
#include "plan/weight_rows.h"
#include "shapes.h"
#include "spec/families/experts.h"

namespace lm {
namespace {

constexpr int64_t kExperts = 16, kChosen = 4, kFfn = 96;

ModelSpec experts_spec() {
  ModelSpec spec = make_spec({256, 512, 4, 4, 2, 64, 4096});
  spec.names = families::expert_names();
  for (LayerSpec& layer : spec.layers)
    layer.sublayers[1].mixer =
        ExpertsSpec{.experts = kExperts, .chosen = kChosen, .ffn = kFfn, .renormalise = true};
  return spec;
}

Case experts_case() {
  Case c{.spec = experts_spec(), .machine = cpu_machine(16)};
  c.config.train.micro_batch = 2;
  return c;
}

TEST(ExpertsPlan, ATokenPaysForTheExpertsThatItMeets) {
  const ModelSpec spec = experts_spec();
  ModelSpec dense = make_spec({256, kChosen * kFfn, 4, 4, 2, 64, 4096});
  const auto flops = [](const ModelSpec& of) {
    return necessary_flops(of, make_layout(of, nullptr, DType::kF32), uniform_work(1, 512));
  };
  const double router = 6.0 * kExperts * 256 * 4;  // of a token
  EXPECT_DOUBLE_EQ(flops(spec), flops(dense) + router);
}

TEST(ExpertsPlan, AllExpertsAreThereAndOneIsOneRange) {
  const ModelSpec spec = experts_spec();
  const ModelLayout layout = make_layout(spec, nullptr, DType::kF32);
  const BlockLayout& block = layout.blocks[1];
  int64_t of_experts = 0, end = 0;
  for (const TensorPlace& place : block.tensors) {
    if (!place.parameter.of_expert()) continue;
    if (end > 0) {
      EXPECT_EQ(place.offset, round_up(end, kTensorStart)) << place.parameter.name << ": side by side";
    }
    end = place.offset + place.parameter.elements();
    of_experts += place.parameter.elements();
  }
  EXPECT_EQ(of_experts, kExperts * 3 * kFfn * 256);
  const TensorPlace* const third = block.find("layers.0.experts.3.gate_up");
  ASSERT_NE(third, nullptr);
  EXPECT_EQ(third->parameter.parts.front().name, "model.layers.0.mlp.experts.3.gate_proj.weight");
  EXPECT_EQ(third->parameter.parts.back().first, kFfn);
}

TEST(ExpertsPlan, RoutersAreNeverQuantizedAndAdaptersAreOnTheAttention) {
  const ModelSpec spec = experts_spec();
  const AdapterSpec lora{.r = 4, .alpha = 8, .targets = resolve_targets(spec.names, {"all-linear"}, "test")};
  EXPECT_EQ(lora.targets, (std::vector<std::string>{"q_proj", "k_proj", "v_proj", "o_proj"}));
  const ModelLayout layout = make_layout(spec, &lora, DType::kBF16, &encoding_of(EncodingKind::kNf4));
  const BlockLayout& block = layout.blocks[1];
  EXPECT_FALSE(block.find("layers.0.experts.router")->encoded());
  EXPECT_TRUE(block.find("layers.0.experts.router")->frozen);
  EXPECT_TRUE(block.find("layers.0.experts.15.down")->encoded());
  for (const char* target : {"gate_proj", "mlp.gate", "down_proj"})
    EXPECT_THROW(resolve_targets(spec.names, {target}, "test"), Error) << target;
}

TEST(ExpertsPlan, SaysHowMuchATokenMeets) {
  const Plan plan = experts_case().plan();
  const auto said = std::ranges::find(plan.choices, std::string("experts"), &Choice::key);
  ASSERT_NE(said, plan.choices.end());
  EXPECT_EQ(said->value, "4 of 16 for each token, in 4 of 4 layers");
  EXPECT_TRUE(plan.fits);
}

int64_t row_bytes(const Plan& plan, const std::string& name) {
  int64_t out = 0;
  for (const ClassBytes& row : plan.classes)
    if (row.name == name) out += row.bytes;
  return out;
}

TEST(ExpertsPlan, TheirMemoryStandsApart) {
  constexpr int64_t kAll = 4 * kExperts * 3 * kFfn * 256;  // whole kTensorStart
  for (const bool lora : {false, true}) {
    SCOPED_TRACE(lora);
    Case c = experts_case();
    if (lora) c.config.train.method = Method::kLora;
    c.lora.targets = resolve_targets(c.spec.names, {"all-linear"}, "test");
    const Plan plan = c.plan();
    const ModelLayout layout = c.layout(lora ? &c.lora : nullptr);
    const std::string frozen = lora ? "frozen " : "";
    const int64_t size = static_cast<int64_t>(
        dtype_size(c.config.model.dtype == ModelDType::kBF16 ? DType::kBF16 : DType::kF32));
    EXPECT_EQ(row_bytes(plan, frozen + "experts"), kAll * size);
    const int64_t all = lora ? layout.frozen_bytes : layout.flat_elements * size;
    EXPECT_EQ(row_bytes(plan, frozen + "experts") + row_bytes(plan, frozen + "weights"), all);
    EXPECT_EQ(row_bytes(plan, lora ? "experts" : "frozen experts"), 0);
    EXPECT_NE(plan_json(plan).find("experts\""), std::string::npos);
  }
}

// Of shards in the device's memory each row has its part: experts have no more than their own.
TEST(ExpertsPlan, InShardsTheirMemoryStandsApart) {
  constexpr int kRanks = 4;
  Case c = experts_case();
  stay_near(c.config);
  c.config.train.global_batch = 2 * kRanks;
  const Plan whole = c.draft();
  c.world.ranks = kRanks;
  c.config.zero.stage = 3;
  const Plan shards = c.draft();
  ASSERT_EQ(shards.placement.pool(Pool::kWeights).shards, kRanks);
  EXPECT_NEAR(static_cast<double>(row_bytes(shards, "experts")) * kRanks /
                  static_cast<double>(row_bytes(whole, "experts")),
              1, 0.05);
  // Of the others the embedding is whole on each rank.
  EXPECT_GT(row_bytes(shards, "weights"),
            row_bytes(whole, "weights") / kRanks + c.layout(nullptr).blocks.front().flat_elements);
}

TEST(ExpertsPlan, WhereTheyAreStreamedTheirRowsAddUpAndRoutingIsExpected) {
  const auto plan_of = [](OffloadTier tier, int64_t micro_batches = 1) {
    Case c = experts_case();
    c.config.offload.weights = tier;
    c.config.train.micro_batch = 1;
    c.config.train.global_batch = micro_batches;
    c.config.train.recompute = Recompute::kBlock;
    c.config.data.max_length = 8;
    c.machine = gpu_machine("H100");
    c.device = DeviceType::kCuda;
    return c.plan();
  };
  const Plan near = plan_of(OffloadTier::kNone), far = plan_of(OffloadTier::kHost);
  const auto said = [](const Plan& plan) {
    return std::ranges::find(plan.choices, std::string("experts off the device"), &Choice::key);
  };
  EXPECT_EQ(said(near), near.choices.end());
  ASSERT_NE(said(far), far.choices.end());
  const double share = 1 - std::pow(1 - 4.0 / 16, 8);
  EXPECT_DOUBLE_EQ(
      expected_expert_share(std::get<ExpertsSpec>(experts_spec().layers[0].sublayers[1].mixer), 8), share);
  EXPECT_NE(said(far)->reason.find("8 tokens that choose evenly meet 90 % of the experts"), std::string::npos)
      << said(far)->reason;
  // A group of micro-batches meets what is fetched for it once.
  const Plan grouped = plan_of(OffloadTier::kHost, 2);
  ASSERT_EQ(grouped.step.group, 2);
  EXPECT_NE(said(grouped)->reason.find("16 tokens that choose evenly meet 99 % of the experts"),
            std::string::npos)
      << said(grouped)->reason;
  for (const char* const name : {"experts", "weights"}) {
    int64_t host = 0, all = 0;
    for (const ClassBytes& row : far.classes) {
      if (row.name != name) continue;
      EXPECT_GE(row.bytes, 0);
      all += row.bytes;
      if (row.tier_id == TierId::kHost) host += row.bytes;
    }
    EXPECT_GT(host, 0) << name;
    // Arrays off the device are filled up; of the other weights the embedding has a row of its own.
    if (std::string(name) == "experts") {
      EXPECT_GE(all, row_bytes(near, name));
    }
  }
}

// Where at most half of the frozen experts are expected to be met, these alone are read, and compute waits.
TEST(ExpertsPlan, FrozenOnesThatFewTokensMeetAreReadByRouting) {
  for (const int64_t tokens : {2, 3}) {  // 44 and 58 % of the experts
    SCOPED_TRACE(tokens);
    Case c = experts_case();
    c.config.train.method = Method::kLora;
    c.lora.targets = resolve_targets(c.spec.names, {"all-linear"}, "test");
    c.config.train.micro_batch = 1;
    c.config.train.global_batch = 1;
    c.config.train.recompute = Recompute::kBlock;
    c.config.data.max_length = tokens;
    stay_near(c.config);
    c.config.offload.weights = OffloadTier::kNvme;
    c.config.offload.paths = {"d"};
    c.machine.disks = {{"d", int64_t{1} << 40, 3e9, 2e9, 4e9}};
    const Plan plan = c.plan();
    const ModelLayout layout = c.layout(&c.lora);
    const auto& spec = *c.spec.layer(0).find<ExpertsSpec>();
    const bool routed = tokens == 2;
    EXPECT_EQ(fetches_by_routing(spec, tokens), routed);
    for (int64_t unit = 1; unit <= 4; ++unit) EXPECT_EQ(routes_experts(plan, unit, spec, {}), routed);
    const auto free = [](const Operation&) { return 0.0; };
    const Timeline whole =
        walk_timeline(plan.step, plan.placement.timeline(), link_rates(c.machine, c.device), free);
    const double missed = 1 - expected_expert_share(spec, static_cast<double>(tokens));
    // In units of all experts of a layer. A step's tokens are other ones than those for which a block that is
    // still in its slot was fetched.
    const StepSchedule list = steady_steps(plan.step).back();
    int64_t fetches = 0;
    double read = 0;
    std::vector<int> asked(6);
    for (int step = 0; step < 40; ++step) {  // a block that is never fetched again has all in the end
      fetches = 0, read = 0;
      for (const Operation& op : list.operations) {
        if (op.kind == OperationKind::kFetch && op.pool == Pool::kWeights && op.array >= 1 && op.array <= 4)
          ++fetches, asked[static_cast<size_t>(op.array)] = 0;
        if (!computes(op.kind) || op.unit < 1 || op.unit > 4) continue;
        int& times = asked[static_cast<size_t>(op.unit)];
        if (times > 0 && op.kind != OperationKind::kForward) continue;
        read += (1 - missed) * std::pow(missed, times++);
      }
    }
    ASSERT_GT(fetches, 0);
    const auto all = static_cast<double>(expert_bytes(layout.blocks[1]).frozen);
    const double left = routed ? (static_cast<double>(fetches) - read) * all : 0;
    EXPECT_NEAR(whole.disk_read_bytes - plan.timeline.disk_read_bytes, left,
                1e-3 * whole.disk_read_bytes)  // a walk ends where steps differ by less
        << fetches;
    const auto said = std::ranges::find(plan.choices, std::string("experts off the device"), &Choice::key);
    ASSERT_NE(said, plan.choices.end());
    EXPECT_NE(said->reason.find(routed ? "when the router has chosen" : "a whole block is fetched"),
              std::string::npos)
        << said->reason;
  }
}

// What a router chooses comes when it has: nothing of it is hidden behind compute, and the rest is.
TEST(ExpertsPlan, ComputeWaitsForWhatRoutersChoose) {
  StepConfig step;
  step.units = schedule_units(2);
  for (ScheduleUnit& unit : step.units) unit.frozen = true;
  step.pool(Pool::kWeights) = {{0, 1, 1, 0}, 1};
  TimelineShape shape;
  shape.arrays[static_cast<size_t>(Pool::kWeights)] = {{0}, {100, true}, {100, true}, {0}};
  const auto seconds = [](const Operation& op) { return op.kind == OperationKind::kForward ? 10.0 : 1.0; };
  const LinkRates rates{.disk_read = 10, .disk_write = 10};
  const Timeline before = walk_timeline(step, shape, rates, seconds);
  for (TimelineShape::Array& array : shape.arrays[static_cast<size_t>(Pool::kWeights)])
    if (array.bytes > 0) array.bytes = 60, array.routed = 50;
  const StepSchedule list = steady_steps(step).back();
  int64_t fetches = 0;
  for (const Operation& op : list.operations) fetches += op.kind == OperationKind::kFetch ? 1 : 0;
  ASSERT_GE(fetches, 2) << "through one slot";
  ASSERT_EQ(before.disk_read_bytes, 100.0 * static_cast<double>(fetches));
  const Timeline after = walk_timeline(step, shape, rates, seconds);
  EXPECT_EQ(after.disk_read_bytes, 60.0 * static_cast<double>(fetches));
  EXPECT_GE(after.waiting_seconds, 5.0 * static_cast<double>(fetches));
  // The first layer stays in the slot from backward on: the next step's tokens ask for half of the experts,
  // and find a half of these there. Its last layer's backward asks for nothing.
  ASSERT_EQ(fetches, 2);
  for (TimelineShape::Array& array : shape.arrays[static_cast<size_t>(Pool::kWeights)])
    array.routed_share = 0.5;
  EXPECT_EQ(walk_timeline(step, shape, rates, seconds).disk_read_bytes, 60.0 * 2 + 50.0 * 0.5);
}

TEST(ExpertsPlan, TheirLoadIsBalancedAsTheFileSaysUnlessTheKeySaysOtherwise) {
  ModelSpec spec = experts_spec();
  TrainConfig train;
  EXPECT_EQ(router_aux_loss(train, spec), 0);
  spec.router_aux_loss = 0.02;
  EXPECT_EQ(router_aux_loss(train, spec), 0.02);
  EXPECT_NO_THROW(refuse_router_loss(train, spec));
  train.router_aux_loss = 0;
  EXPECT_EQ(router_aux_loss(train, spec), 0);
  EXPECT_NO_THROW(refuse_router_loss(train, spec));
  train.router_aux_loss = 0.5;
  const ModelSpec dense = make_spec({256, 512, 4, 4, 2, 64, 4096});
  EXPECT_THROW(refuse_router_loss(train, dense), Error);
}

TEST(ExpertsPlan, RoutersWithSigmoidScoresAreBalancedByTheirCorrections) {
  ModelSpec spec = experts_spec();
  std::get<ExpertsSpec>(spec.layers[2].sublayers[1].mixer).scores = RouterScores::kSigmoid;
  TrainConfig train;
  EXPECT_NO_THROW(refuse_router_loss(train, spec));
  train.router_aux_loss = 0.01;
  EXPECT_THROW(refuse_router_loss(train, spec), Error);
}

// As many FLOP whatever the number of experts, but for the router's, and as many calls: no expert has a
// product of its own.
TEST(ExpertsPlan, AGpuMultipliesThoseOfManyExpertsTogether) {
  const auto plan_of = [](int64_t experts) {
    Case c = experts_case();
    for (LayerSpec& layer : c.spec.layers) std::get<ExpertsSpec>(layer.sublayers[1].mixer).experts = experts;
    c.machine = gpu_machine("H100");
    c.device = DeviceType::kCuda;
    c.config.train.recompute = Recompute::kNone;
    return c.plan();
  };
  const Plan few = plan_of(16), many = plan_of(64);
  EXPECT_TRUE(many.fits);
  EXPECT_EQ(few.estimate.cost.gemm_calls, many.estimate.cost.gemm_calls);
  const double router = 6.0 * (64 - 16) * 256 * 4 * few.step_tokens;
  const double flops = few.estimate.cost.gemm_flops;
  EXPECT_NEAR(many.estimate.cost.gemm_flops, flops + router, 1e-6 * flops);
  // Their weights are read, and their gradients written.
  EXPECT_GT(many.estimate.cost.bytes, few.estimate.cost.bytes + 4.0 * 48 * 3 * kFfn * 256);
}

// Quantized ones are dequantized for some experts at a time, and more than one launch has at most are
// several, too: each has rows of its own.
TEST(ExpertsPlan, AGpuCountsTheRowsOfEachLaunchOnce) {
  const auto flops_of = [](int64_t experts, Quantize quantize) {
    Case c = experts_case();
    c.spec = make_spec({2048, 4096, 2, 16, 4, 128, 4096});
    c.spec.names = families::expert_names();
    for (LayerSpec& layer : c.spec.layers)
      layer.sublayers[1].mixer =
          ExpertsSpec{.experts = experts, .chosen = kChosen, .ffn = 768, .renormalise = true};
    c.machine = gpu_machine("H200");
    c.device = DeviceType::kCuda;
    c.config.train.method = Method::kLora;
    c.config.train.recompute = Recompute::kNone;
    c.config.model.quantize = quantize;
    c.lora.targets = {"q_proj", "v_proj"};
    const Plan plan = c.plan();
    // Without the router's, which has a row for each expert.
    return plan.estimate.cost.gemm_flops - 4.0 * static_cast<double>(experts) * 2048 * 2 * plan.step_tokens;
  };
  const double plain = flops_of(128, Quantize::kNone);
  EXPECT_NEAR(flops_of(128, Quantize::kNf4), plain, 1e-6 * plain);
  EXPECT_NEAR(flops_of(256, Quantize::kNone), plain, 0.01 * plain);
}

// The pass that counts what routers choose sends a step's batches before the step does.
TEST(ExpertsPlan, AGpuHasRoomForTheBatchesOfThePassThatCounts) {
  const auto bytes = [](double coefficient, int64_t micro_batches) {
    Case c = experts_case();
    c.machine = gpu_machine("H100");
    c.device = DeviceType::kCuda;
    c.config.train.recompute = Recompute::kNone;
    c.config.train.micro_batch = 1;
    c.config.train.global_batch = micro_batches;
    c.config.train.router_aux_loss = coefficient;
    const Plan plan = c.plan();
    EXPECT_EQ(plan.step.group, 1);
    return plan.upload_bytes;
  };
  EXPECT_EQ(bytes(0.1, 2), 2 * bytes(0, 2));
  EXPECT_EQ(bytes(0.1, 1), bytes(0, 1)) << "one micro-batch has counted before it goes back";
}

// Whatever the number of experts.
TEST(ExpertsPlan, AGpuMultipliesThePairsOfExpertsTogether) {
  const auto plan_of = [](bool pairs, int64_t experts) {
    Case c = experts_case();
    c.spec.names.experts = "mlp.experts";
    for (LayerSpec& layer : c.spec.layers) std::get<ExpertsSpec>(layer.sublayers[1].mixer).experts = experts;
    c.machine = gpu_machine("H100");
    c.device = DeviceType::kCuda;
    c.config.train.method = Method::kLora;
    c.config.train.recompute = Recompute::kNone;
    c.lora.targets = {"q_proj", "v_proj"};
    if (pairs) c.lora.targets.insert(c.lora.targets.end(), {"experts.gate_up_proj", "experts.down_proj"});
    return c.plan();
  };
  const Plan without = plan_of(false, 16), few = plan_of(true, 16), many = plan_of(true, 64);
  EXPECT_TRUE(many.fits);
  EXPECT_EQ(few.estimate.cost.gemm_calls, many.estimate.cost.gemm_calls);
  // Of a row and matrix: its pair forward, what goes back through it, and its gradients; and what is not
  // kept. The first layer's input has a gradient, too, for the pairs of its attention.
  const double r = 16, gate_up = 256 + 2 * kFfn, down = kFfn + 256;
  const double again = r * (256 + down);  // A x of both matrices, and s dy B of down
  const double flops = 2.0 * kChosen * 4 * few.step_tokens * (3 * r * (gate_up + down) + again);
  EXPECT_NEAR(few.estimate.cost.gemm_flops - without.estimate.cost.gemm_flops, flops, 1e-6 * flops);
}

}  // namespace
}  // namespace lm
