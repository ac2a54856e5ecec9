// Updates inside backward against updates after it: gradients of one block at a time never change a bit of
// losses, norms, weights or moments, wherever state lives and however a step is clipped and cut. Built twice:
// for the CPU, which stands in for a GPU where a run is `slots_on_device`, and for a GPU, where it skips
// without one.
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "base/error.h"
#include "pairwise.h"
#include "tests/support/counts.h"
#include "tests/support/device_test.h"

namespace lm {
namespace {

using namespace offloaded_run;

class InBackward : public DeviceTest {};

// What a run of the matrix is drawn from: rule, tier of state, clip mode, accumulation, tile, threads of the
// update, recomputation, model.
constexpr int kFactors = 8;
using Row = std::array<size_t, kFactors>;
constexpr Row kLevels = {Rules::kSize, kOffloadTiers, 3, 2, 3, 2, 2, 4};

Variant variant_of(const Row& row) {
  Variant run;
  run.in_backward = true;
  run.steps = 6;
  run.rule = static_cast<RuleId>(row[0]);
  set_tier(row[1], run);
  run.clip = static_cast<Clip>(row[2]);
  run.micro_batches = row[3] == 0 ? 1 : 4;
  run.granules = std::array<int64_t, 3>{1, 3, 1000}[row[4]];
  run.optimizer_threads = static_cast<int>(row[5]) + 1;
  run.recompute = row[6] == 1;
  run.activations = run.recompute && row[1] > 0;
  if (!run.activations) run.level = drawn_level(static_cast<int>(row[0]));
  run.lora = row[7] == 1, run.tied = row[7] != 2 && row[7] != 3;
  if (row[7] == 3) run.vocab = 17000;  // a head in segments where weights are off the device
  run.master = static_cast<Master>(row[0] % 3);
  run.gradient_dtype = row[0] % 2 == 0 ? DType::kF32 : DType::kBF16;
  return run;
}

TEST_F(InBackward, GivesTheSameBitsForEveryPairOfSettings) {
  std::vector<Row> rows = pairwise<kFactors>(kLevels, 11);
  EXPECT_LT(rows.size(), 80U);
  // Early rows cover the most pairs.
  rows.resize(test::counts(rows.size() / 2, rows.size()));
  for (const Row& row : rows) {
    const Variant run = variant_of(row);
    SCOPED_TRACE(run.text());
    expect_same(run, Training(run).run());
  }
}

TEST_F(InBackward, GivesTheSameBitsInEachTierUnderEachClipping) {
  for (const Clip clip : {Clip::kGlobal, Clip::kBlock, Clip::kNone}) {
    for (size_t tier_id = 0; tier_id < kLevels[1]; ++tier_id) {
      // On the emulated GPU each tier has one of the clippings in the short tier.
      if (cuda_built() && !test::full_counts() && tier_id % 3 != static_cast<size_t>(clip)) continue;
      Variant run;
      run.in_backward = true;
      run.clip = clip, run.micro_batches = 2, run.steps = 6;
      run.recompute = tier_id % 2 == 0;
      run.level = drawn_level(static_cast<int>(tier_id / 2) + (clip == Clip::kGlobal ? 0 : 1));
      set_tier(tier_id, run);
      SCOPED_TRACE(run.text());
      expect_same(run, Training(run).run());
    }
  }
}

TEST_F(InBackward, GivesTheSameBitsForBiasesNormsOfHeadsAndWindows) {
  for (const Family family : {Family::kQwen2, Family::kQwen3, Family::kMistral}) {
    for (const bool tied : {false, true}) {
      Variant run;
      run.in_backward = run.recompute = true;
      run.family = family, run.tied = tied, run.micro_batches = 2, run.steps = 6;
      SCOPED_TRACE(run.text());
      expect_same(run, Training(run).run());
    }
  }
}

// A tied table's gradient is begun by the head, that of the positions beside it by nobody: it must not be
// what lay there.
TEST_F(InBackward, GivesTheSameBitsForShapesOfOtherFamilies) {
  for (const Family family : {Family::kGpt2, Family::kGemma, Family::kCohere, Family::kGranite,
                              Family::kGemma4, Family::kExpertsBeside}) {
    for (const bool defer_tied_gradient : {false, true}) {
      if (defer_tied_gradient && family == Family::kGemma4) continue;  // no plan has it
      Variant run;
      run.in_backward = run.recompute = true, run.defer_tied_gradient = defer_tied_gradient;
      run.clip = defer_tied_gradient ? Clip::kBlock : Clip::kGlobal;
      run.family = family, run.micro_batches = 2, run.steps = 3;
      SCOPED_TRACE(run.text());
      expect_same(run, Training(run).run());
    }
  }
}

// Rule, tier of state, clip mode, accumulation, recomputation, rows of the table.
constexpr int kTableFactors = 6;
constexpr std::array<size_t, kTableFactors> kTableLevels = {Rules::kSize, kOffloadTiers, 2, 2, 2, 3};

// The head's product comes a second time, after everything else, and the sums are the same.
TEST_F(InBackward, GivesTheSameBitsWithATiedTablesGradientMadeLast) {
  auto rows = pairwise<kTableFactors>(kTableLevels, 12);
  if (!test::full_counts() || device() == DeviceType::kCuda) rows.resize(16);  // early rows cover the most
  for (const auto& row : rows) {
    Variant run;
    run.in_backward = run.defer_tied_gradient = true;
    run.steps = 3;
    run.rule = static_cast<RuleId>(row[0]);
    set_tier(row[1], run);
    run.clip = row[2] == 0 ? Clip::kBlock : Clip::kNone;
    run.micro_batches = row[3] == 0 ? 1 : 4;
    run.recompute = row[4] == 1;
    run.activations = run.recompute && row[1] > 0;
    run.vocab = std::array<int64_t, 3>{300, 3000, 9000}[row[5]];  // shorter than a block, longer, in segments
    run.master = static_cast<Master>(row[0] % 3);
    run.gradient_dtype = row[0] % 2 == 0 ? DType::kF32 : DType::kBF16;
    SCOPED_TRACE(run.text());
    expect_same(run, Training(run).run());
  }
}

TEST_F(InBackward, GivesTheSameBitsWithThatInEachTier) {
  for (size_t tier_id = 0; tier_id < kLevels[1]; ++tier_id) {
    Variant run;
    run.in_backward = run.defer_tied_gradient = true;
    run.clip = tier_id % 2 == 0 ? Clip::kBlock : Clip::kNone, run.micro_batches = 2, run.steps = 3;
    run.recompute = tier_id % 3 != 0;
    run.vocab = 9000;
    set_tier(tier_id, run);
    SCOPED_TRACE(run.text());
    expect_same(run, Training(run).run());
  }
}

// The head gives the nll and then takes weights, those that a fused pass knows beforehand or others: whole,
// in segments, with a table made last, and in both of two backwards.
TEST_F(InBackward, GivesTheSameBitsWhereTheHeadHasTwoPhases) {
  for (const int bits : {0, 1, 2, 3}) {
    for (const int kind : {0, 1, 2, 3}) {
      Variant run;
      const bool in_backward = (bits & 1) != 0;
      run.two_phases = true, run.weighed = (bits & 2) != 0, run.in_backward = in_backward;
      run.micro_batches = 4, run.group = 3, run.steps = 2;
      run.tied = kind == 2, run.lora = kind == 3;
      run.vocab = kind == 1 ? 17000 : kind == 2 ? 9000 : 300;
      run.weights = kind == 1, run.recompute = kind != 0;
      run.defer_tied_gradient = in_backward && kind == 2;
      if (run.defer_tied_gradient) run.clip = Clip::kBlock;
      SCOPED_TRACE(run.text());
      Training training(run);
      EXPECT_EQ(training.head_segments() > 0, kind == 1);
      expect_same(run, training.run());
    }
  }
}

// Bytes of gradients that a plan counts.
int64_t gradient_bytes(const Plan& plan) {
  int64_t sum = 0;
  for (const ClassBytes& row : plan.classes) sum += row.name == "gradients" ? row.bytes : 0;
  return sum;
}

TEST_F(InBackward, HasMemoryForOneBlocksGradientAndATiedEmbeddings) {
  for (const bool tied : {false, true}) {
    Variant run;
    run.tied = tied, run.layers = 6, run.in_backward = true;
    Training training(run);
    int64_t longest = 0, all = 0, kept = 0;
    const std::vector<BlockLayout>& blocks = training.layout().blocks;
    for (size_t b = 0; b < blocks.size(); ++b) {
      all += blocks[b].flat_elements * 4;
      if (b > 0 || !tied) longest = std::max(longest, blocks[b].flat_elements * 4);
    }
    if (tied) kept = blocks.front().flat_elements * 4;
    EXPECT_EQ(gradient_bytes(training.plan()), longest + kept);
    EXPECT_EQ(training.gradients().bytes(), longest + kept);
    run.in_backward = false;
    Training after(run);
    EXPECT_EQ(gradient_bytes(after.plan()), all);
    EXPECT_EQ(after.gradients().bytes(), all);
  }
}

// It lies where activations were, and takes no more of the arena than it needs beyond them.
TEST_F(InBackward, HasATablesGradientInThePlaceOfWhatHasEnded) {
  for (const int64_t vocab : {300, 3000, 60000}) {
    Variant run;
    run.in_backward = true, run.recompute = true, run.vocab = vocab, run.clip = Clip::kBlock;
    run.micro_batches = 2;
    Training first(run);
    run.defer_tied_gradient = true;
    Training last(run);
    last.step(1), last.step(2);
    EXPECT_EQ(last.gradients().bytes(), 0);
    int64_t slot = 0;
    const std::vector<BlockLayout>& blocks = last.layout().blocks;
    for (size_t b = 1; b < blocks.size(); ++b) slot = std::max(slot, blocks[b].flat_elements * 4);
    const int64_t table = blocks.front().flat_elements * 4;
    EXPECT_EQ(first.gradients().bytes(), slot + table);
    const int64_t arena = last.plan().arena.bytes, before = first.plan().arena.bytes;
    EXPECT_LT(arena, before + slot + table);
    EXPECT_GE(arena, std::max(before + slot, table));
    EXPECT_EQ(last.rank().arena().capacity(), arena);
  }
}

// Whoever asks for a gradient that is no more is a mistake of ours.
TEST_F(InBackward, RefusesAGradientThatAnotherBlockHasReplaced) {
  Variant run;
  run.in_backward = true, run.tied = false, run.clip = Clip::kBlock;
  Training training(run);
  training.step(1);
  EXPECT_NE(training.gradients().unit(0), nullptr);  // the embedding's is the last
  EXPECT_THROW(training.gradients().unit(1), Error);
}

// Under global clipping nothing is updated before all norms are known: a bad step is skipped as ever, and its
// tensor named, whose gradient the second backward has.
TEST_F(InBackward, ASkippedStepChangesNoByteAndIsExplained) {
  for (const bool recompute : {false, true}) {
    for (size_t tier_id = 0; tier_id < kLevels[1]; ++tier_id) {
      std::vector<StepResult> results[2];
      State states[2];
      for (const bool in_backward : {false, true}) {
        Variant run;
        run.tied = false, run.recompute = recompute, run.in_backward = in_backward;
        set_tier(tier_id, run);
        SCOPED_TRACE(run.text());
        Training training(run);
        training.step(1);
        const State before = training.state();
        const float was = training.replace_norm_weight(std::numeric_limits<float>::infinity());
        const StepResult bad = training.step(2);
        training.replace_norm_weight(was);
        EXPECT_TRUE(bad.skipped);
        EXPECT_EQ(bad.fault, "the gradient of tensor norm is nan (rank 0)");
        EXPECT_TRUE(training.state() == before);
        const StepResult good = training.step(3);
        EXPECT_FALSE(good.skipped);
        EXPECT_EQ(good.fault, "");
        results[in_backward] = {bad, good};
        states[in_backward] = training.state();
      }
      EXPECT_EQ(results[1][1].loss, results[0][1].loss);
      EXPECT_EQ(results[1][1].grad_norm, results[0][1].grad_norm);
      EXPECT_TRUE(states[1] == states[0]);
    }
  }
}

// Otherwise blocks behind may already be updated: the run ends at once.
TEST_F(InBackward, ABadGradientWithoutGlobalClippingEndsTheRun) {
  for (const Clip clip : {Clip::kBlock, Clip::kNone}) {
    Variant run;
    run.tied = false, run.in_backward = true, run.clip = clip;
    Training training(run);
    training.step(1);
    training.replace_norm_weight(std::numeric_limits<float>::infinity());
    try {
      training.step(2);
      ADD_FAILURE() << "the run goes on";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kNumerics);
      EXPECT_TRUE(
          error.text().what.starts_with("step 2: the gradient of tensor norm is nan (rank 0); the weights"))
          << error.report();
    }
  }
}

// Between the two, a run may change from one to the other.
TEST_F(InBackward, GoesOnFromACheckpointBitForBit) {
  for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
    for (const size_t tier_id : {0, 2}) {
      Variant run;
      run.clip = clip, run.micro_batches = 2, run.recompute = true, run.steps = 6;
      set_tier(tier_id, run);
      Variant inside = run;
      inside.in_backward = true;
      Training first(inside);
      for (int64_t step = 1; step <= 3; ++step) first.step(step);
      const Training::Copy copy = first.copy();
      for (const Variant& later : {run, inside}) {
        SCOPED_TRACE(later.text());
        Training training(later);
        training.restore(copy);
        for (int64_t step = 4; step <= 6; ++step) training.step(step);
        EXPECT_TRUE(training.state() == reference(run).state);
      }
    }
  }
}

}  // namespace
}  // namespace lm
