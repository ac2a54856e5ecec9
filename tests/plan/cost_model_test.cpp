#include "plan/cost_model.h"

#include <gtest/gtest.h>

#include <numeric>

#include "shapes.h"

namespace lm {
namespace {

// Published tokens per second at 100 % of one H100's speed of light, T = 1024, bf16.
TEST(SpeedOfLight, EqualsPublishedFigures) {
  const struct {
    ModelSizes shape;
    double tokens_per_second;
    bool tied = true;
  } cases[] = {{{896, 4864, 24, 14, 2, 64, 151936}, 319'585},
               {{1536, 8960, 28, 12, 2, 128, 151936}, 103'867},
               {{2048, 11008, 36, 16, 2, 128, 151936}, 52'164},
               {{3584, 18944, 28, 28, 4, 128, 152064}, 22'990, false},
               {{5120, 13824, 48, 40, 8, 128, 152064}, 11'579, false},
               {{5120, 27648, 64, 40, 8, 128, 152064}, 5'102, false}};
  for (const auto& c : cases) {
    const ModelSpec spec = make_spec(c.shape, c.tied);
    const double flops =
        necessary_flops(spec, make_layout(spec, nullptr, DType::kBF16), uniform_work(1, 1024));
    EXPECT_NEAR(989.4e12 / flops, c.tokens_per_second, 2e-4 * c.tokens_per_second) << c.shape.hidden;
  }
}

TEST(SpeedOfLight, OfLoraNeedsNoWeightGradientOfTheBase) {
  const ModelSpec spec = llama_8b();
  const AdapterSpec lora = adapter_r16();
  const double base = 32.0 * ((4096 + 2048) * 4096 + 4096 * 4096 + 3 * 14336 * 4096) + 128256.0 * 4096;
  const double expected = 4 * base + 6 * 41'943'040.0 + 6 * 32.0 * 4096 * 2048;
  EXPECT_DOUBLE_EQ(necessary_flops(spec, make_layout(spec, &lora, DType::kBF16), uniform_work(1, 2048)),
                   expected);
}

TEST(SpeedOfLight, CountsTargetsAndWindows) {
  ModelSpec spec = smollm2_135m();
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  const double all = necessary_flops(spec, layout, uniform_work(1000, 500));
  const double half = necessary_flops(spec, layout, uniform_work(1000, 500, 0.5));
  EXPECT_DOUBLE_EQ(all - half, 6 * 49152.0 * 576 * 500);
  set_windows(spec, 500);
  EXPECT_DOUBLE_EQ(necessary_flops(spec, layout, uniform_work(1000, 500)), all);
  set_windows(spec, 100);
  // A token sees 100 keys, less at the start of a document: 100 - 100²/1000 of them instead of 250.
  EXPECT_NEAR(necessary_flops(spec, layout, uniform_work(1000, 500)),
              all - 12 * 30 * 576.0 * 1000 * (250 - 90), 1e-9 * all);
}

StepShape shape_of(const ModelSpec& spec, const ModelLayout& layout, const AdapterSpec* adapter = nullptr) {
  return {.model = {spec, layout, adapter},
          .step = {.units = {}, .recompute = Recompute::kBlock},
          .micro = uniform_work(1024, 512),
          .step_tokens = 4096};
}

TEST(StepEstimate, IsTheSumOverTheStepsList) {
  const ModelSpec spec = smollm2_135m();
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  const ComputeRates rates = compute_rates(cpu_machine(16), DeviceType::kCpu, DType::kBF16);
  EXPECT_FALSE(rates.assumed);
  const StepCosts costs(shape_of(spec, layout));
  for (const int64_t micro_batches : {1, 2, 5}) {
    const StepConfig schedule{.units = schedule_units(30),
                              .micro_batches = micro_batches,
                              .tied = true,
                              .recompute = Recompute::kBlock};
    double expected = 0;
    for (const Operation& op : make_schedule(schedule).operations) {
      expected += cost_seconds(costs.of(op), rates);
    }
    const StepEstimate p = estimate_step(costs, schedule, rates);
    EXPECT_NEAR(p.seconds, expected, 1e-9 * expected);
    EXPECT_NEAR(p.gemm_seconds + p.attention_seconds + p.memory_seconds, expected, 1e-9 * expected);
    EXPECT_NEAR(std::accumulate(p.by_kind.begin(), p.by_kind.end(), 0.0), expected, 1e-9 * expected);
  }
}

TEST(StepEstimate, MultipliesWhatTheSpeedOfLightSays) {
  const ModelSpec spec = smollm2_135m();
  const ComputeRates rates = compute_rates(cpu_machine(16), DeviceType::kCpu, DType::kBF16);
  const StepConfig schedule{.units = schedule_units(30), .micro_batches = 4, .tied = true};
  const double attention = 12 * 30 * 576.0 * 256 * 4096;
  const ModelLayout full = make_layout(spec, nullptr, DType::kBF16);
  StepShape shape = shape_of(spec, full);
  shape.step.recompute = Recompute::kNone;
  EXPECT_NEAR(estimate_step(StepCosts(shape), schedule, rates).cost.gemm_flops,
              necessary_flops(spec, full, uniform_work(4096, 512)) - attention, 1e6);
  // A frozen embedding wants no input gradient of the first block's q, k, v, nor of their adapters' A.
  const AdapterSpec adapter = adapter_r16();
  const ModelLayout lora = make_layout(spec, &adapter, DType::kBF16);
  StepShape adapted = shape_of(spec, lora, &adapter);
  adapted.step.recompute = Recompute::kNone;
  const double unwanted = 2 * 576.0 * (960 + 3 * 16) * 4096;
  EXPECT_NEAR(estimate_step(StepCosts(adapted), schedule, rates).cost.gemm_flops,
              necessary_flops(spec, lora, uniform_work(4096, 512)) - attention - unwanted, 1e6);
}

// Adapters of a wider type than their model's multiply at that type's rate.
TEST(StepEstimate, TimesFp32AdaptersAtTheRateOfFp32) {
  const ModelSpec spec = smollm2_135m();
  const ComputeRates rates = compute_rates(cpu_machine(16), DeviceType::kCpu, DType::kBF16);
  ASSERT_LT(rates.fp32_gemm_flops, 0.9 * rates.gemm_flops);
  const StepConfig schedule{.units = schedule_units(30), .micro_batches = 1, .tied = true};
  const AdapterSpec adapter = adapter_r16();
  const ModelLayout layout = make_layout(spec, &adapter, DType::kBF16);
  double elements = 0;
  for (const BlockLayout& block : layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      if (!place.frozen) elements += static_cast<double>(place.parameter.rows * place.parameter.columns);
    }
  }
  StepShape shape = shape_of(spec, layout, &adapter);
  shape.step.recompute = Recompute::kNone;
  const StepEstimate narrow = estimate_step(StepCosts(shape), schedule, rates);
  EXPECT_EQ(narrow.cost.fp32_gemm_flops, 0);
  shape.step.arithmetic.fp32_adapters = true;
  const StepEstimate wide = estimate_step(StepCosts(shape), schedule, rates);
  const double unwanted = 2 * 576.0 * 3 * 16, tokens = shape.micro.tokens;
  EXPECT_NEAR(wide.cost.fp32_gemm_flops, (6 * elements - unwanted) * tokens, 1e6);
  EXPECT_NEAR(wide.gemm_seconds - narrow.gemm_seconds,
              wide.cost.fp32_gemm_flops * (1 / rates.fp32_gemm_flops - 1 / rates.gemm_flops),
              1e-9 * wide.gemm_seconds);
}

// On one CPU attention reaches 0.4 of its products' rate, on another 0.12.
TEST(StepEstimate, TimesAttentionAtItsOwnRate) {
  const ModelSpec spec = smollm2_135m();
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  const StepConfig schedule{.units = schedule_units(30), .micro_batches = 1, .tied = true};
  StepShape shape = shape_of(spec, layout);
  shape.step.recompute = Recompute::kNone;
  Machine machine = cpu_machine(16);
  machine.attention_flops = 50e9;
  const StepEstimate p =
      estimate_step(StepCosts(shape), schedule, compute_rates(machine, DeviceType::kCpu, DType::kBF16));
  // Seven products of 256 keys on average.
  EXPECT_NEAR(p.attention_seconds, 14 * 256 * 1024 * 30 * 576.0 / 50e9, 1e-9);
}

// What a GEMM's call takes is measured where the run computes.
TEST(StepEstimate, TimesCallsAsTheyWereMeasured) {
  const ModelSpec spec = smollm2_135m();
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  const StepConfig schedule{.units = schedule_units(30), .micro_batches = 1, .tied = true};
  StepShape shape = shape_of(spec, layout);
  shape.step.recompute = Recompute::kNone;
  const StepCosts costs(shape);
  const auto estimated = [&](double gemm) {
    Machine machine = cpu_machine(16);
    machine.gemm_call_seconds = gemm;
    return estimate_step(costs, schedule, compute_rates(machine, DeviceType::kCpu, DType::kBF16));
  };
  const StepEstimate quick = estimated(1e-6), slow = estimated(8e-6);
  // Of a block q k v together or not, o, gate, up, down: each forward once and backward twice.
  EXPECT_GE(quick.cost.gemm_calls, 3 * 4 * 30);
  EXPECT_LE(quick.cost.gemm_calls, 3 * 8 * 30);
  EXPECT_GT(quick.cost.calls, quick.cost.gemm_calls + 30);
  EXPECT_NEAR(slow.seconds - quick.seconds, 7e-6 * quick.cost.gemm_calls, 1e-9);
}

TEST(StepEstimate, UpdatesWithTwentyEightBytesPerParameter) {
  const ModelSpec spec = smollm2_135m();
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  StepShape shape = shape_of(spec, layout);
  const Operation update{OperationKind::kUpdate, 1, 0};
  const auto flat = static_cast<double>(layout.blocks[1].flat_elements);
  EXPECT_DOUBLE_EQ(StepCosts(shape).of(update).bytes, 28 * flat);
  shape.step.arithmetic.gradient_dtype = DType::kBF16;
  EXPECT_DOUBLE_EQ(StepCosts(shape).of(update).bytes, 26 * flat);
}

TEST(StepEstimate, PaysForRecomputationWithTheForward) {
  const ModelSpec spec = llama_1b();
  const ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  const ComputeRates rates = compute_rates(gpu_machine("H200"), DeviceType::kCuda, DType::kBF16);
  StepShape shape = shape_of(spec, layout);
  shape.step.device = DeviceType::kCuda;
  shape.step.recompute = Recompute::kNone;
  StepConfig schedule{.units = schedule_units(16), .micro_batches = 2, .tied = true};
  const StepEstimate none = estimate_step(StepCosts(shape), schedule, rates);
  schedule.recompute = shape.step.recompute = Recompute::kBlock;
  const StepEstimate block = estimate_step(StepCosts(shape), schedule, rates);
  // All projections of the blocks but the last one.
  const double again = 2.0 * 2048 * 16 * (3072.0 * 2048 + 2048.0 * 2048 + 2 * 8192.0 * 2048);
  EXPECT_NEAR(block.cost.gemm_flops - none.cost.gemm_flops, again, 1e-9 * none.cost.gemm_flops);
  EXPECT_LT(block.seconds, none.seconds * 4 / 3);
}

TEST(Rates, FallBackToDocumentedDefaultsAndSaySo) {
  Machine machine;
  machine.cores = 4;
  EXPECT_TRUE(compute_rates(machine, DeviceType::kCpu, DType::kBF16).assumed);
  EXPECT_GT(compute_rates(machine, DeviceType::kCpu, DType::kF32).peak_flops, 0);
  machine.gpus.push_back(built_in_gpu("something new"));
  EXPECT_TRUE(compute_rates(machine, DeviceType::kCuda, DType::kBF16).assumed);
  const ComputeRates h200 = compute_rates(gpu_machine("NVIDIA H200"), DeviceType::kCuda, DType::kBF16);
  EXPECT_FALSE(h200.assumed);
  EXPECT_DOUBLE_EQ(h200.peak_flops, 989.4e12);
  EXPECT_LT(h200.gemm_flops, h200.peak_flops);
}

// Data sheets: A100 156 TFLOP/s of TF32 beside 19.5 of fp32, RTX 3090 35.6 of both.
TEST(Rates, OfTf32AreHalfOfThoseOfBf16) {
  const auto of = [](const char* card, Products products, DType dtype = DType::kF32) {
    return compute_rates(gpu_machine(card), DeviceType::kCuda, dtype, products);
  };
  EXPECT_DOUBLE_EQ(of("A100", Products::kF32).peak_flops, 19.5e12);
  EXPECT_DOUBLE_EQ(of("A100", Products::kTF32).peak_flops, 156e12);
  EXPECT_NEAR(of("3090", Products::kTF32).peak_flops, 35.6e12, 0.2e12);
  // Of adapters in fp32 beside a bf16 model, whose own rate stays.
  const ComputeRates mixed = of("A100", Products::kTF32, DType::kBF16);
  EXPECT_DOUBLE_EQ(mixed.peak_flops, 312e12);
  EXPECT_DOUBLE_EQ(mixed.fp32_gemm_flops, of("A100", Products::kTF32).gemm_flops);
}

}  // namespace
}  // namespace lm
