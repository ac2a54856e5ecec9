// Every pair of settings of a run that may not change its bits, and of those that decide them: rules, tiers,
// time of updates, clip modes, accumulation, tiles, threads, masters, gradients, recomputation and models,
// each row against the run that keeps everything on the device and updates at the end. Built twice: for the
// CPU, which stands in for a GPU where a run is `slots_on_device`, and for a GPU, where it skips without one.
#include "pairwise.h"
#include "tests/support/device_test.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <span>

namespace lm {
namespace {

using namespace offloaded_run;

class Pairwise : public DeviceTest {};

enum Factor : size_t {
  kRule,
  kTier,
  kUpdate,
  kClip,
  kMicro,
  kTile,
  kThreads,
  kMaster,
  kGradient,
  kAgain,
  kModel,
  kFactors
};
using Row = std::array<size_t, kFactors>;
constexpr Row kLevels = {Rules::kSize, kOffloadTiers, 2, 3, 2, 3, 2, 3, 2, 2, 7};

std::vector<Row> rows() {
  return pairwise<kFactors>(kLevels, 15);
}

// Tied; not tied; a head in segments; adapters; DoRA with adapters wider than the model; adapters of a
// quantized base; adapters beside the frozen pairs that they began with.
void set_model(size_t model, Variant& run) {
  run.tied = model != 1 && model != 2;
  if (model == 2) run.vocab = 17000;
  run.lora = model >= 3;
  if (model == 4) run.r = 96, run.dora = true;
  if (model == 5) run.base = EncodingKind::kNf4Double;
  if (model == 6) run.pissa = true;
}

Variant variant_of(const Row& row) {
  Variant run;
  run.steps = 5;
  run.rule = static_cast<RuleId>(row[kRule]);
  set_tier(row[kTier], run);
  run.in_backward = row[kUpdate] == 1;
  run.gradients = !run.in_backward && row[kTier] > 0;
  run.clip = static_cast<Clip>(row[kClip]);
  run.micro_batches = row[kMicro] == 0 ? 1 : 4;
  run.group = 3;
  run.granules = std::array<int64_t, 3>{1, 3, 1000}[row[kTile]];
  run.optimizer_threads = static_cast<int>(row[kThreads]) + 1;
  run.master = static_cast<Master>(row[kMaster]);
  run.gradient_dtype = row[kGradient] == 0 ? DType::kF32 : DType::kBF16;
  run.recompute = row[kAgain] == 1;
  run.activations = run.recompute && row[kTier] > 0;
  set_model(row[kModel], run);
  return run;
}

void expect_same_bits(std::span<const Row> some) {
  for (const Row& row : some) {
    const Variant run = variant_of(row);
    SCOPED_TRACE(run.text());
    expect_same(run, Training(run).run());
    if (testing::Test::HasFailure()) return;
  }
}

TEST_F(Pairwise, HasEveryPairOfTwoFactorsLevels) {
  const std::vector<Row> all = rows();
  for (size_t a = 0; a < kFactors; ++a) {
    for (size_t b = a + 1; b < kFactors; ++b) {
      std::vector<char> together(kLevels[a] * kLevels[b], 0);
      for (const Row& row : all) together[row[a] * kLevels[b] + row[b]] = 1;
      EXPECT_EQ(std::count(together.begin(), together.end(), 0), 0) << "factors " << a << " and " << b;
    }
  }
  std::printf("%zu rows\n", all.size());
  EXPECT_LT(all.size(), 100U);
}

// Those that cover the most: every tier, both times of updates and rules of every kind.
TEST_F(Pairwise, TheFirstRowsGiveTheSameBits) {
  const std::vector<Row> all = rows();
  const std::span<const Row> first = std::span(all).first(10);
  const auto levels = [&](size_t factor) {
    std::set<size_t> out;
    for (const Row& row : first) out.insert(row[factor]);
    return out;
  };
  EXPECT_EQ(levels(kTier).size(), kOffloadTiers);
  EXPECT_EQ(levels(kUpdate).size(), 2U);
  EXPECT_GE(levels(kRule).size(), 6U);
  expect_same_bits(first);
}

// Adapters without pairs of low rank: factors, copies of norms, of which one is in the head's block, and
// virtual tokens, of which a prompt is in the embedding's.
TEST_F(Pairwise, OtherAdaptersGiveTheSameBitsOffTheDevice) {
  for (const AdapterKind kind :
       {AdapterKind::kIa3, AdapterKind::kNorms, AdapterKind::kPrefix, AdapterKind::kPrompt}) {
    for (const bool fp32 : {false, true}) {
      Variant run;
      run.steps = 4;
      run.lora = true;
      run.kind = kind;
      run.tied = fp32;
      run.family = kind == AdapterKind::kNorms    ? Family::kQwen3
                   : kind == AdapterKind::kPrompt ? Family::kGranite
                                                  : Family::kQwen2;
      run.fp32_adapters = fp32;
      run.master = fp32 ? Master::kF32 : Master::kSplit;
      run.base = fp32 ? EncodingKind::kNf4Double : EncodingKind::kPlain;
      run.optimizer = run.weights = true;
      run.recompute = run.activations = run.in_backward = fp32;
      SCOPED_TRACE(run.text());
      const Outcome got = Training(run).run();
      expect_same(run, got);
      EXPECT_NE(got.losses.front(), got.losses.back());
    }
  }
}

// P-tuning: the embedding's block has matrices and biases, in several granules.
TEST_F(Pairwise, AnEncoderGivesTheSameBitsOffTheDevice) {
  for (const bool fp32 : {false, true}) {
    Variant run;
    run.steps = 4;
    run.lora = true;
    run.kind = AdapterKind::kPrompt;
    run.encoder = 96;
    run.tied = !fp32;
    run.fp32_adapters = fp32;
    run.master = fp32 ? Master::kF32 : Master::kSplit;
    run.base = fp32 ? EncodingKind::kNf4Double : EncodingKind::kPlain;
    run.micro_batches = fp32 ? 1 : 3;
    run.optimizer = run.weights = true;
    run.gradients = !fp32;
    run.recompute = run.activations = run.in_backward = fp32;
    SCOPED_TRACE(run.text());
    const Outcome got = Training(run).run();
    expect_same(run, got);
    EXPECT_NE(got.losses.front(), got.losses.back());
  }
}

TEST_F(Pairwise, EveryRowGivesTheSameBits) {
  expect_same_bits(rows());
}

}  // namespace
}  // namespace lm
