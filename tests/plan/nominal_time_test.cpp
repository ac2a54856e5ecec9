// The micro-batch of a GPU run follows from the named card's nominal rates, and from nothing that was
// measured.
#include "plan/nominal_time.h"

#include <gtest/gtest.h>

#include "optim/rules/rules.h"
#include "shapes.h"

namespace lm {
namespace {

constexpr int64_t kGib = int64_t{1} << 30;

Case full_8b(const char* card, int64_t gib) {
  Case c{.spec = llama_8b(), .machine = gpu_machine(card), .device = DeviceType::kCuda};
  c.machine.gpus[0].memory_bytes = gib * kGib;
  c.config.data.max_length = 2048;
  c.config.train.global_batch = 8;
  c.config.train.gradients = GradientDType::kBF16;
  stay_near(c.config);
  return c;
}

TEST(NominalTime, EightBillionOn140GibSaveActivationsOfSomeSequences) {
  const Plan plan = full_8b("H200", 140).plan();
  EXPECT_EQ(plan.recompute(), RecomputeChoice(Recompute::kNone));
  EXPECT_GE(plan.numerics.micro_batch, 2);
  EXPECT_LE(plan.numerics.micro_batch, 4);
}

// The rows of benchmarks/gpu_arithmetic.py that are named for what the plan takes.
TEST(NominalTime, EightBillionOn140GibInStepsOf65536Tokens) {
  Case c = full_8b("H200", 140);
  c.config.train.global_batch = 32;
  EXPECT_EQ(c.plan().numerics.micro_batch, 2);
}

TEST(NominalTime, SevenBillionTakeEightSequencesOf1024) {
  Case c = full_8b("H200", 140);
  c.spec = make_spec({4096, 11008, 32, 32, 32, 128, 32000}, false);
  c.config.data.max_length = 1024;
  c.config.train.global_batch = 128;
  EXPECT_EQ(c.plan().numerics.micro_batch, 8);
  c.machine = gpu_machine("H100");
  c.machine.gpus[0].memory_bytes = 80 * kGib;
  c.config.optimizer.name = Rules::id<AdamW8bit>();
  c.config.optimizer.master = Master::kNone;
  const Plan plan = c.plan();
  EXPECT_TRUE(plan.fits);
  EXPECT_EQ(plan.numerics.micro_batch, 8);
  EXPECT_EQ(plan.recompute(), RecomputeChoice(Recompute::kNone));
}

TEST(NominalTime, MeasuredRatesChangeNoNumerics) {
  for (const int64_t gib : {100, 120, 140, 180}) {
    Case c = full_8b("H200", gib);
    const Plan plan = c.draft();
    c.machine.gpus[0].bf16_flops *= 4;
    c.machine.gpus[0].fp32_flops /= 3;
    c.machine.gpus[0].bandwidth /= 10;
    EXPECT_EQ(c.draft().numerics.micro_batch, plan.numerics.micro_batch) << gib;
  }
}

// 1024 tokens at once fill a card better than what recomputation costs, 64 do not.
TEST(NominalTime, FewTokensWithSavedActivationsBeatManyRecomputed) {
  const AdapterSpec lora = adapter_r16();
  Case c = full_8b("H100", 80);
  c.config.train.method = Method::kLora;
  const ModelLayout layout = c.layout(&lora);
  const PlanInput in{{c.config, c.spec, &lora, layout, c.device, {}, {}, nullptr}, c.machine, {}, {}};
  const double recomputed = nominal_product_seconds(in, 16384, true);
  EXPECT_LT(nominal_product_seconds(in, 1024, false), recomputed);
  EXPECT_LT(nominal_product_seconds(in, 2048, false), nominal_product_seconds(in, 1024, false));
  EXPECT_GT(nominal_product_seconds(in, 64, false), recomputed);
}

// As much memory as saves the activations of one sequence of 1024 tokens: it is not recomputed for the sake
// of more at once.
TEST(NominalTime, OneShortSequenceIsNotRecomputed) {
  bool seen = false;
  for (int64_t mib = 17 << 10; mib < 30 << 10 && !seen; mib += 128) {
    Case c = full_8b("H100", 0);
    c.machine.gpus[0].memory_bytes = mib << 20;
    c.config.train.method = Method::kLora;
    c.config.data.max_length = 1024;
    const Plan plan = c.draft();
    if (!plan.fits || plan.recompute() != RecomputeChoice(Recompute::kNone)) continue;
    c.config.train.recompute = Recompute::kBlock;
    seen = plan.numerics.micro_batch == 1 && c.draft().numerics.micro_batch > 1;
  }
  EXPECT_TRUE(seen);
}

}  // namespace
}  // namespace lm
