// What legal keys may not ask for, and that a plan's work does not follow them: bounds, estimates of steps of
// many micro-batches, caches, and bugs that nothing swallows.
#include "plan/limits.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "base/bytes.h"
#include "base/staging.h"
#include "plan/estimate.h"
#include "plan/scaling.h"
#include "plan/traffic.h"
#include "plan/what_if.h"
#include "shapes.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

std::string refusal(const Case& c) {
  try {
    c.plan();
  } catch (const Error& error) {
    return error.report();
  }
  return "planned";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Limits, ThreadsAreAsManyAsCoresCanUse) {
  Case c{.machine = cpu_machine(64)};
  c.config.run.threads = 1000;
  EXPECT_TRUE(has(refusal(c),
                  "error CONF-20 (exit 10): run.threads = 1000: expected at most 64 here, where "
                  "this process has 2 cores"))
      << refusal(c);
  c.machine.cores = 300;
  EXPECT_EQ(refusal(c), "planned");
  c.machine.cores = 2;
  c.config.run.threads = 64;
  c.config.optimizer.threads = 65;
  EXPECT_TRUE(has(refusal(c), "optimizer.threads = 65"));
  // A run that began on a larger machine goes on, and is exported and evaluated.
  c.config.optimizer.threads = c.config.run.threads = 1000;
  for (const PlanPurpose purpose : {PlanPurpose::kEvaluate, PlanPurpose::kExport}) {
    c.purpose = purpose;
    EXPECT_FALSE(has(refusal(c), "threads = 1000"));
  }
  Case recorded{.machine = cpu_machine(64)};
  const NumericsPlan numerics = recorded.plan().numerics;
  c.purpose = PlanPurpose::kTrain;
  c.recorded = &numerics;
  EXPECT_FALSE(has(refusal(c), "threads = 1000"));
}

TEST(Limits, Tf32ProductsAreMadeByGpusThatHaveThem) {
  Case c{.machine = cpu_machine(64)};
  c.config.model.products = Products::kTF32;
  EXPECT_TRUE(has(refusal(c),
                  "error CONF-20 (exit 10): model.products = \"tf32\": TF32 products are made by GPUs of "
                  "compute capability 8.0 or more, and this is the CPU"))
      << refusal(c);
  c.purpose = PlanPurpose::kEvaluate;  // of a run that was trained on a GPU: fp32 products
  EXPECT_EQ(refusal(c), "planned");
  EXPECT_EQ(c.plan().numerics.products, Products::kF32);
  Case gpu{.machine = gpu_machine("A100"), .device = DeviceType::kCuda};
  gpu.config.model.products = Products::kTF32;
  EXPECT_EQ(refusal(gpu), "planned");
  EXPECT_EQ(gpu.plan().numerics.products, Products::kTF32);
  EXPECT_TRUE(has(print_plan(gpu.plan()), "fp32 products as TF32"));
  gpu.machine.gpus.front().capability = {7, 5};
  EXPECT_TRUE(has(refusal(gpu), "and this is a GPU of 7.5")) << refusal(gpu);
}

TEST(Limits, MicroBatchesOfAStepAreBounded) {
  Case c{.machine = cpu_machine(64)};
  c.config.train.global_batch = 1'000'000;
  EXPECT_TRUE(has(refusal(c),
                  "train.global_batch = 1000000 makes 1000000 micro-batches of 1 on a rank: "
                  "expected at most 65536"))
      << refusal(c);
  c.world = {64, 8};
  EXPECT_FALSE(has(refusal(c), "expected at most"));
}

TEST(Limits, TilesOfOptimizerStateAreBounded) {
  Case c{.spec = llama_8b(), .machine = cpu_machine(64)};
  c.config.offload.paths = {"d"};
  c.config.offload.optimizer = OffloadTier::kNvme;
  c.config.io.tile = ByteSize{40960};
  c.machine.disks = {{.path = "d", .free_bytes = int64_t{1} << 40}};
  EXPECT_TRUE(has(refusal(c), "cuts the optimizer's state into more than 32768 tiles")) << refusal(c);
  c.config.io.tile = ByteSize{4 * kMiB};
  const Plan plan = c.draft();
  EXPECT_LE(std::ssize(plan.placement.granules), kMostTiles + 40);
}

TEST(Limits, OnlySoManyMicroBatchesPassABlockTogether) {
  Case c{.machine = cpu_machine(64)};
  c.config.train.micro_batch = 1;
  c.config.train.global_batch = 1025;
  c.config.train.update = UpdateTime::kInBackward;
  EXPECT_TRUE(has(refusal(c), "at most 1024, and there are 1025")) << refusal(c);
  c.config.train.update = UpdateTime::kAuto;
  EXPECT_EQ(refusal(c), "planned");
  // Weights off the device are shared by many, and more would save next to nothing.
  Case gpu{.spec = llama_8b(), .machine = gpu_machine("H100"), .device = DeviceType::kCuda};
  gpu.config.train.micro_batch = 1;
  gpu.config.train.global_batch = 60'000;
  gpu.config.train.recompute = Recompute::kBlock;
  gpu.config.offload.weights = OffloadTier::kHost;
  EXPECT_LE(gpu.draft().placement.group, 128);
}

// What the list of a step takes is planned, where it is long.
TEST(Limits, TheListOfALongStepIsPlanned) {
  Case c{.machine = cpu_machine(64)};
  c.config.train.micro_batch = 1;
  c.config.train.global_batch = 64;
  EXPECT_EQ(class_bytes(c.draft(), "list of a step"), -1);
  c.config.train.global_batch = 60'000;
  EXPECT_GT(class_bytes(c.draft(), "list of a step"), int64_t{1} << 30);
}

// The others take what the last of those that are walked do: as much as if all of them were.
TEST(Limits, AnEstimateOfManyMicroBatchesIsThatOfFewAndTheRest) {
  for (const bool disk : {true, false}) {
    Case c{.spec = llama_1b(), .machine = gpu_machine("4090"), .device = DeviceType::kCuda};
    c.config.train.micro_batch = 1;
    c.config.train.global_batch = 1000;
    c.config.offload.weights = c.config.offload.optimizer = disk ? OffloadTier::kNvme : OffloadTier::kHost;
    if (disk) c.config.offload.paths = {"d"};
    c.machine.disks = {{"d", int64_t{1} << 40, 3e9, 2e9, 4e9}};
    const Plan plan = c.draft();
    const ModelLayout layout = c.layout(nullptr);
    const PlanInput in{{c.config, c.spec, nullptr, layout, c.device}, c.machine, {}, PlanPurpose::kTrain};
    const StepCosts costs(step_shape(in, plan));
    const Timeline all = walk_timeline(plan.step, plan.placement.timeline(), link_rates(c.machine, c.device),
                                       operation_seconds(in, plan, costs));
    EXPECT_NEAR(plan.timeline.seconds, all.seconds, 0.01 * all.seconds);
    EXPECT_NEAR(plan.timeline.link_bytes, all.link_bytes, 0.02 * all.link_bytes);
    EXPECT_NEAR(plan.timeline.disk_written_bytes, all.disk_written_bytes, 0.02 * all.disk_written_bytes + 1);
    EXPECT_GE(plan.step_seconds, 0.99 * plan.estimate.seconds);
  }
}

TEST(Limits, TrafficOfManyMicroBatchesIsThatOfFewAndTheRest) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(64), .world = {4}};
  c.config.train.micro_batch = 1;
  c.config.train.global_batch = 4 * 500;
  c.config.zero.stage = 3;
  const Plan plan = c.draft();
  const ModelLayout layout = c.layout(nullptr);
  const StepSchedule step = steady_steps(plan.step).back();
  const RankTraffic all = traffic_of(Traffic(layout, plan.numerics, plan.placement, c.world), step, c.world,
                                     rank_links(c.machine, c.device));
  EXPECT_NEAR(plan.traffic.bytes(), all.bytes(), 0.01 * all.bytes());
  EXPECT_NEAR(plan.traffic.seconds, all.seconds, 0.01 * all.seconds);
  EXPECT_NEAR(static_cast<double>(plan.traffic.calls), static_cast<double>(all.calls),
              0.01 * static_cast<double>(all.calls));
}

// What each has written is resident in all that read it.
TEST(Limits, RanksOfAMachineHaveWhatAllOfThemSend) {
  Case c{.machine = cpu_machine(64), .world = {4}};
  EXPECT_EQ(class_bytes(c.draft(), "shared memory"), 4 * kRankStagingBytes);
  c.world = {4, 4};
  EXPECT_EQ(class_bytes(c.draft(), "shared memory"), kRankStagingBytes);
}

// A step is never more than an epoch.
TEST(Limits, AnEstimateIsForTheRowsThatThereAre) {
  Case c{.machine = cpu_machine(64)};
  c.config.train.global_batch = 1000;
  c.config.train.micro_batch = 1;
  const Plan all = c.draft();
  c.data.sequences = 40;
  const Plan forty = c.draft();
  EXPECT_EQ(forty.step_tokens, 40 * 2048);
  EXPECT_EQ(forty.numerics, all.numerics);
  EXPECT_EQ(forty.step.micro_batches, 40);
  EXPECT_LT(forty.step_seconds, 0.05 * all.step_seconds);
  c.data.sequences = 5000;
  EXPECT_EQ(c.draft().step_seconds, all.step_seconds);
  const ModelLayout layout = c.layout(nullptr);
  const PlanInputs inputs{c.config, c.spec, nullptr, layout, c.device, {.sequences = 40}, {}, nullptr};
  Plan again = all;
  estimate_again(inputs, c.machine, again);
  EXPECT_EQ(again.step_seconds, forty.step_seconds);
  EXPECT_EQ(again.choices.size(), all.choices.size());
}

// Rows shorter than data.max_length take less; packed ones are full, and their attention sees less.
TEST(Limits, AnEstimateIsForTheLengthsThatTheDataHave) {
  Case c{.machine = cpu_machine(64)};
  c.config.train.global_batch = 8;
  c.config.train.micro_batch = 1;
  const Plan full = c.draft();
  EXPECT_EQ(full.sequence_tokens, 0);
  c.data = {.mean_length = 256, .document_length = 300, .target_share = 0.5};
  const Plan rows = c.draft();
  EXPECT_EQ(rows.step_tokens, 8 * 256);
  EXPECT_EQ(rows.sequence_tokens, 256);
  EXPECT_EQ(rows.peak.host, full.peak.host);  // planned for the longest
  EXPECT_LT(rows.estimate.gemm_seconds, full.estimate.gemm_seconds / 8);
  EXPECT_LT(rows.estimate.attention_seconds, full.estimate.attention_seconds / 8);
  EXPECT_LT(rows.peak_seconds_per_token, full.peak_seconds_per_token);
  c.data = {.mean_length = 2048, .document_length = 256};
  const Plan packed = c.draft();
  EXPECT_EQ(packed.step_tokens, full.step_tokens);
  EXPECT_EQ(packed.estimate.gemm_seconds, full.estimate.gemm_seconds);
  EXPECT_NEAR(packed.estimate.attention_seconds, full.estimate.attention_seconds / 8,
              1e-9 * full.estimate.attention_seconds);
  c.data = {.mean_length = 1e9};  // of a longer max_length
  EXPECT_EQ(c.draft().step_seconds, full.step_seconds);
}

// Whatever a pass depends on tells two apart.
TEST(Limits, DryRunsAreCachedByTheWholeShape) {
  Case c{.machine = cpu_machine(64)};
  const ModelLayout layout = c.layout(nullptr);
  const World world;
  const PlanInput in{{c.config, c.spec, nullptr, layout, c.device}, c.machine, world, PlanPurpose::kTrain};
  Plan plan = c.draft();
  const ArenaNeed need = in.dry_runs->arena(in, plan.numerics, plan.step);
  EXPECT_EQ(in.dry_runs->arena(in, plan.numerics, plan.step).bytes, need.bytes);
  plan.step.arithmetic.row_chunk = 64;
  EXPECT_LT(in.dry_runs->arena(in, plan.numerics, plan.step).logits, need.logits);
  plan.step.arithmetic.row_chunk = 512;
  plan.step.arithmetic.dtype = DType::kF32;
  EXPECT_GT(in.dry_runs->arena(in, plan.numerics, plan.step).saved, need.saved);
}

TEST(Limits, ABugOfThePlannerIsNoAdvice) {
  // Adapters of what the model does not have: there is no such plan.
  Case full;
  const ModelLayout whole = full.layout(nullptr);
  const Setting impossible{{"lora.targets=nowhere"}, [](Config& config) {
                             config.train.method = Method::kLora;
                             config.lora.targets = {"nowhere"};
                           }};
  EXPECT_FALSE(plan_with(
      {{full.config, full.spec, nullptr, whole, full.device}, full.machine, {}, PlanPurpose::kTrain},
      {impossible}, Estimated::kAll));
  // A matrix of more parts than the model's code knows is a bug.
  Case c;
  c.config.train.method = Method::kLora;
  c.config.model.quantize = Quantize::kNf4;
  const AdapterSpec lora = adapter_r16();
  ModelLayout layout = c.layout(&lora);
  for (BlockLayout& block : layout.blocks) {
    for (TensorPlace& place : block.tensors) {
      if (place.encoded()) place.parameter.parts.resize(kMostParts + 1, place.parameter.parts.front());
    }
  }
  const PlanInput in{{c.config, c.spec, &lora, layout, c.device}, c.machine, {}, PlanPurpose::kTrain};
  EXPECT_THROW(plan_with(in, {}, Estimated::kAll), Error);
}

Scaling scaling_of(const std::vector<std::pair<int, bool>>& rows) {
  Scaling out;
  for (const auto& [ranks, fits] : rows) {
    ScalingRow& row = out.rows.emplace_back();
    row.world = {ranks};
    row.fits = fits;
    row.efficiency = fits ? 0.5 : 0;
    if (fits && out.fewest == 0) out.fewest = ranks;
  }
  return out;
}

TEST(Limits, ScalingSaysWhichRowsFit) {
  const Plan plan =
      Case{.spec = llama_1b(), .machine = gpu_machine("H100"), .device = DeviceType::kCuda}.draft();
  EXPECT_TRUE(has(print_scaling(scaling_of({{1, true}, {2, false}, {4, true}}), plan),
                  "fits on 1, 4 GPUs, of these\n"));
  EXPECT_TRUE(has(print_scaling(scaling_of({{1, true}, {2, true}}), plan), "fits on 1 GPU or more\n"));
  EXPECT_TRUE(has(print_scaling(scaling_of({{1, false}, {2, true}}), plan), "fits on 2 GPUs or more\n"));
  EXPECT_TRUE(has(print_scaling(scaling_of({{1, false}, {2, false}}), plan), "fits on none of these\n"));
  EXPECT_TRUE(has(print_scaling(scaling_of({{1, false}, {2, true}}), plan), "-  DOES NOT FIT"));
}

// One GPU keeps its state in host memory, eight need not: a rank of these does more.
TEST(Limits, NoRankDoesMoreThanTheBest) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("H100"), .device = DeviceType::kCuda};
  c.config.zero.stage = 3;
  c.config.train.global_batch = 64;
  Machine node = c.machine;
  node.host_memory = int64_t{2048} * kGiB;
  const ModelLayout layout = c.layout(nullptr);
  const PlanInputs inputs{c.config, c.spec, nullptr, layout, c.device, {}, {}, nullptr};
  const Scaling scaling = estimate_scaling(inputs, node, {8, 1});
  double best = 0;
  for (const ScalingRow& row : scaling.rows) {
    EXPECT_LE(row.efficiency, 1) << row.world.ranks;
    EXPECT_TRUE(row.fits || row.efficiency == 0);
    best = std::max(best, row.efficiency);
  }
  EXPECT_DOUBLE_EQ(best, 1);
  EXPECT_LT(scaling.rows.front().efficiency, 1);
}

TEST(Limits, SizesThatAGpuMultipliesSlowlyAreNoted) {
  Case c{.spec = make_spec({768, 2049, 2, 12, 12, 64, 50257}),
         .machine = gpu_machine("H200"),
         .device = DeviceType::kCuda};
  c.config.train.micro_batch = 1;
  const auto notes = [&c](const std::string& key) {
    std::vector<std::string> out;
    for (const Choice& choice : c.plan().choices) {
      if (choice.key == key) out.push_back(choice.reason);
    }
    return out;
  };
  const auto has = [](const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  };
  ASSERT_EQ(notes("multiples of 8").size(), 1u);
  const std::string widths = notes("multiples of 8")[0];
  // Three matrices of each layer, two of which are one, and the tied head's; attention's are not among them.
  const double attention = 2 * 4 * 768 * 768, mlp = 2 * 3.0 * 2049 * 768, head = 50257.0 * 768;
  const double gate_up = 2 * 4104.0 * 768, down = 2 * 2056.0 * 768;  // 2 x 2049 = 4098
  EXPECT_TRUE(has(widths, "embed [50257, 768]") && has(widths, "[768, 2049]") && has(widths, "[4098, 768]"))
      << widths;
  EXPECT_TRUE(
      has(widths, fmt::format("{:.0f} % of the step's", 100 * (mlp + head) / (attention + mlp + head))))
      << widths;
  const double padded = (gate_up + down + 50264.0 * 768) / (mlp + head);
  EXPECT_TRUE(has(widths, fmt::format("{:.2g} % more elements", 100 * (padded - 1)))) << widths;
  c.config.data.max_length = 1001;
  ASSERT_EQ(notes("multiples of 8").size(), 2u);
  EXPECT_TRUE(has(notes("multiples of 8")[1], "1 x 1001 tokens")) << notes("multiples of 8")[1];
  EXPECT_TRUE(has(notes("multiples of 8")[1], "data.max_length = 1008 makes 0.7 % more"))
      << notes("multiples of 8")[1];
  c.config.train.micro_batch = 8;  // their sum is one
  EXPECT_EQ(notes("multiples of 8").size(), 1u);
  // An A100 wants 64, but not of an adapter's rank.
  c.spec = make_spec({768, 2056, 2, 12, 12, 64, 50304});
  EXPECT_TRUE(notes("multiples of 8").empty());
  c.machine = gpu_machine("A100");
  c.config.data.max_length = 1024;
  c.config.train.method = Method::kLora;
  ASSERT_EQ(notes("multiples of 64").size(), 1u);
  EXPECT_TRUE(has(notes("multiples of 64")[0], "[768, 2056]") && !has(notes("multiples of 64")[0], "embed"));
  c.spec = make_spec({768, 2048, 2, 12, 12, 64, 50304});
  EXPECT_TRUE(notes("multiples of 64").empty());
  // Neither fp32 nor the CPU.
  c.spec = make_spec({768, 2049, 2, 12, 12, 64, 50257});
  EXPECT_FALSE(notes("multiples of 64").empty());
  c.config.model.dtype = ModelDType::kF32;
  EXPECT_TRUE(notes("multiples of 64").empty());
  c.config.model.dtype = ModelDType::kBF16;
  c.device = DeviceType::kCpu;
  c.machine = cpu_machine(64);
  EXPECT_TRUE(notes("multiples of 64").empty() && notes("multiples of 8").empty());
}

}  // namespace
}  // namespace lm
