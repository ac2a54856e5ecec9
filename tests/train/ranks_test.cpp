// Several ranks that share a step's micro-batches, as threads of this process: what a stage shards and where
// state lives never changes a bit at one number of ranks, and against one rank sums differ in rounding alone.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "pairwise.h"
#include "tests/support/counts.h"
#include "thread_ranks.h"

namespace lm {
namespace {

using namespace offloaded_run;

double relative(double a, double b) {
  return std::abs(a - b) / std::max(std::abs(b), 1e-30);
}

// ||a - b|| / ||b|| over all weights of fp32 runs.
double weights_apart(const State& a, const State& b) {
  double difference = 0, norm = 0;
  for (const auto& [name, bytes] : b) {
    if (!name.ends_with(".weight")) continue;
    const std::vector<std::byte>& other = a.at(name);
    EXPECT_EQ(other.size(), bytes.size()) << name;
    for (size_t i = 0; i + 4 <= std::min(bytes.size(), other.size()); i += 4) {
      float x = 0, y = 0;
      std::memcpy(&x, other.data() + i, 4), std::memcpy(&y, bytes.data() + i, 4);
      difference += std::pow(static_cast<double>(x) - y, 2), norm += std::pow(static_cast<double>(y), 2);
    }
  }
  return std::sqrt(difference / norm);
}

// The contract's bounds (fp32): losses 1e-6, weights after twelve steps 1e-4.
TEST(Ranks, GiveWhatOneRankGives) {
  for (const bool lora : {false, true}) {
    for (const bool tied : {true, false}) {
      Variant run;
      run.lora = lora, run.tied = tied;
      run.dtype = DType::kF32;
      run.micro_batches = 4;
      const Outcome one = run_ranks(run, 1);
      for (const int ranks : {2, 3, 4}) {
        if (!test::full_counts() && ranks != (lora ? 3 : tied ? 2 : 4)) continue;
        const Outcome many = run_ranks(run, ranks);
        for (size_t s = 0; s < one.losses.size(); ++s) {
          EXPECT_LE(relative(many.losses[s], one.losses[s]), 1e-6) << ranks << " ranks, step " << s + 1;
          EXPECT_LE(relative(many.norms[s], one.norms[s]), 1e-5) << ranks << " ranks, step " << s + 1;
        }
        EXPECT_LE(weights_apart(many.state, one.state), 1e-4) << ranks << " ranks " << run.text();
      }
    }
  }
}

TEST(Ranks, AddUpAnObjectivesColumns) {
  Variant run;
  run.weighed = true, run.dtype = DType::kF32, run.micro_batches = 4, run.steps = 1;
  EXPECT_LE(relative(run_ranks(run, 2).losses.front(), run_ranks(run, 1).losses.front()), 1e-6);
}

// Stage 0 and resident against stage 1 in every tier.
TEST(Ranks, StagesAndTiersGiveTheSameBits) {
  for (const int ranks : {2, 3}) {
    for (const bool lora : {false, true}) {
      for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
        if (!test::full_counts() && (ranks + lora + (clip == Clip::kBlock)) % 2 != 0) continue;
        Variant run;
        run.lora = lora, run.clip = clip;
        run.micro_batches = 3;
        run.steps = 6;
        run.stage = 0;
        const Outcome want = run_ranks(run, ranks);
        for (int tiers = 0; tiers < 5; ++tiers) {
          Variant other = run;
          other.stage = 1;
          other.optimizer = tiers == 1 || tiers == 4;
          other.gradients = tiers == 2 || tiers == 4;
          other.weights = tiers == 3 || tiers == 4;
          expect_same(other, ranks, run_ranks(other, ranks), want);
        }
      }
    }
  }
}

// Shards of gradients and of weights, the frozen base's included, against every rank having everything.
TEST(Ranks, EveryStageGivesTheSameBits) {
  for (const int ranks : {2, 3, 4}) {
    for (int64_t which = 0; which < 6; ++which) {
      if (!test::full_counts() && which % 3 != ranks - 2) continue;
      Variant run;
      run.lora = which == 1;
      run.clip = which == 2 ? Clip::kBlock : Clip::kGlobal;
      run.tied = which != 3;
      if (which == 3) run.vocab = 17000;  // a head in segments, once it is sharded
      run.recompute = which == 4;
      run.micro_batches = ranks * (which >= 4 ? 2 : 1);
      run.steps = 5;
      run.stage = 0;
      const Outcome want = run_ranks(run, ranks);
      for (const int64_t stage : {1, 2, 3}) {
        run.stage = stage;
        expect_same(run, ranks, run_ranks(run, ranks), want);
        run.optimizer = true;
        expect_same(run, ranks, run_ranks(run, ranks), want);
        run.optimizer = false;
      }
    }
  }
}

// A block's gradient is exchanged before its update, and gone afterwards.
TEST(Ranks, UpdatesInsideBackwardGiveTheSameBits) {
  for (const int ranks : {2, 3}) {
    for (int64_t which = 0; which < 6; ++which) {
      if (!test::full_counts() && which % 2 != ranks % 2) continue;
      Variant run;
      run.clip = static_cast<Clip>(which % 3);
      run.tied = which < 3;
      run.lora = which == 4;
      if (which == 5) run.vocab = 17000;  // a head in segments, once its weights are in shards
      run.recompute = which % 2 == 1;
      run.micro_batches = ranks * (which >= 2 ? 2 : 1);
      run.steps = 5;
      run.stage = 0;
      const Outcome want = run_ranks(run, ranks);
      run.in_backward = true;
      for (const int64_t stage : {0, 1, 2, 3}) {
        run.stage = stage;
        run.optimizer = which == 3;
        expect_same(run, ranks, run_ranks(run, ranks), want);
        if (!run.tied || run.clip == Clip::kGlobal) continue;
        run.defer_tied_gradient = true;
        expect_same(run, ranks, run_ranks(run, ranks), want);
        run.defer_tied_gradient = false;
      }
    }
  }
}

// Also where a shard begins between the granules of large and of small tensors.
TEST(Ranks, EveryRuleGivesTheSameBitsInShards) {
  for (size_t rule = 0; rule < Rules::kSize; ++rule) {
    for (const bool lora : {false, true}) {
      if (!test::full_counts() && lora != (rule % 2 == 1)) continue;
      Variant run;
      run.rule = static_cast<RuleId>(rule);
      run.lora = lora;
      run.master = static_cast<Master>(rule % 3);
      run.groups = rule % 2 == 0;
      run.micro_batches = 3;
      run.steps = 4;
      run.stage = 0;
      const Outcome want = run_ranks(run, 3);
      for (const int64_t stage : {1, 3}) {
        run.stage = stage;
        expect_same(run, 3, run_ranks(run, 3), want);
        run.optimizer = true;
        expect_same(run, 3, run_ranks(run, 3), want);
        run.optimizer = false;
      }
    }
  }
}

enum Factor : size_t { kStage, kTier, kMethod, kRanks, kClip, kMicro, kSlots, kState, kHead, kFactors };
using Row = std::array<size_t, kFactors>;
constexpr Row kLevels = {2, 5, 3, 3, 2, 2, 2, 2, 2};

// Shards off the device: in host memory, on disk, some in either, some of them on the device.
Variant shards_variant(const Row& row) {
  Variant run;
  run.steps = 6;
  run.stage = static_cast<int64_t>(row[kStage]) + 2;
  set_tier(row[kTier], run);
  run.gradients = row[kTier] > 0;
  run.optimizer = row[kState] == 1;
  run.on_host = run.on_host && run.optimizer;
  run.lora = row[kMethod] > 0;
  if (row[kMethod] == 2) run.base = EncodingKind::kNf4Double;
  run.clip = row[kClip] == 0 ? Clip::kGlobal : Clip::kBlock;
  run.recompute = row[kMicro] == 1;
  run.micro_batches = static_cast<int64_t>(row[kRanks] + 2) * (row[kMicro] == 1 ? 2 : 1);
  run.slots = static_cast<int64_t>(row[kSlots]) + 2;
  run.tied = row[kHead] == 0;
  if (!run.tied) run.vocab = 17000;  // segments
  return run;
}

TEST(Ranks, ShardsOffTheDeviceGiveTheSameBits) {
  const std::vector<Row> rows = pairwise<kFactors>(kLevels, 46);
  for (const Row& row : std::span(rows).first(test::counts<size_t>(8, rows.size()))) {
    const Variant run = shards_variant(row);
    Variant first = run;
    first.stage = 0;
    first.optimizer = first.weights = first.gradients = first.mixed = false;
    first.slots_on_device = first.on_host = false, first.host = 0;
    for (int ranks = static_cast<int>(row[kRanks]) + 2; ranks > 0; ranks = test::counts(0, int{ranks > 1}))
      expect_same(run, ranks, run_ranks(run, ranks), run_ranks(first, ranks));
    if (HasFailure()) return;
  }
}

constexpr RuleId kOfWholeMatrices[] = {Rules::id<Adafactor>(), Rules::id<Muon>(),
                                       Rules::id<AdafactorLowmem>()};

// Of rules that update whole matrices each matrix is on one rank, with its gradient and its state.
TEST(Ranks, ShardsOfWholeMatricesGiveTheSameBits) {
  const std::vector<Row> rows = pairwise<kFactors>(kLevels, 48);
  size_t rule = 0;
  for (const Row& row : std::span(rows).first(test::counts<size_t>(9, rows.size()))) {
    const int ranks = static_cast<int>(row[kRanks]) + 2;
    Variant run = shards_variant(row);
    run.steps = 4;
    run.rule = kOfWholeMatrices[rule++ % std::size(kOfWholeMatrices)];
    Variant first = run;
    first.stage = 0;
    first.optimizer = first.weights = first.gradients = first.mixed = false;
    first.slots_on_device = first.on_host = false, first.host = 0;
    expect_same(run, ranks, run_ranks(run, ranks), run_ranks(first, ranks));
    if (HasFailure()) return;
  }
}

// More ranks than a block has matrices, copies on several machines, and updates inside backward.
TEST(Ranks, WholeMatricesOfManyRanksGiveTheSameBits) {
  for (const RuleId rule : kOfWholeMatrices) {
    Variant run;
    run.rule = rule;
    run.micro_batches = 6;
    run.steps = 3;
    run.stage = 0, run.nodes = 2;
    const Outcome want = run_ranks(run, 6);
    run.in_backward = true;
    run.stage = 3;
    expect_same(run, 6, run_ranks(run, 6), want);
    run.in_backward = false, run.recompute = true;
    run.optimizer = run.weights = run.gradients = true;
    for (const ZeroGroup among : {ZeroGroup::kAll, ZeroGroup::kMachine}) {
      run.among = among;
      expect_same(run, 6, run_ranks(run, 6), want);
    }
  }
}

// Reading, also of tiles that no update has reached, changes nothing.
TEST(Ranks, StateInShardsIsReadBetweenSteps) {
  for (const Master master : {Master::kSplit, Master::kF32}) {
    for (const bool off_device : {false, true}) {
      Variant run;
      run.stage = 3, run.micro_batches = 3, run.steps = 3;
      run.master = master;
      run.optimizer = true;
      run.weights = run.gradients = off_device;
      expect_same(run, 3, run_ranks(run, 3, true), run_ranks(run, 3));
    }
  }
}

// One rank has nothing of some arrays: its slots pass by, and nothing of it is written.
TEST(Ranks, MoreRanksThanGranulesHaveShardsOnDisk) {
  Variant run;
  run.micro_batches = 5;
  run.steps = 4;
  run.stage = 0;
  const Outcome want = run_ranks(run, 5);
  run.stage = 3;
  for (const bool on_device : {false, true}) {
    run.weights = run.gradients = true;
    run.slots_on_device = on_device, run.host = on_device ? 2 : 0;
    expect_same(run, 5, run_ranks(run, 5), want);
  }
}

TEST(Ranks, MoreRanksThanGranulesOrMicroBatches) {
  Variant run;
  run.lora = true;  // adapters of one granule or two
  run.micro_batches = 5;
  run.steps = 4;
  run.stage = 0;
  const Outcome want = run_ranks(run, 5);
  run.stage = 1;
  expect_same(run, 5, run_ranks(run, 5), want);
  run.optimizer = true;
  expect_same(run, 5, run_ranks(run, 5), want);
  run.stage = 3;
  expect_same(run, 5, run_ranks(run, 5), want);
}

// A chunked head's segments are sharded one by one, and gradients in bf16 are added in fp32.
TEST(Ranks, ChunkedHeadsAndShortGradients) {
  for (const int ranks : {2, 3}) {
    Variant run;
    run.tied = false;
    run.vocab = 17000;
    run.micro_batches = 3;
    run.steps = 4;
    run.gradient_dtype = DType::kBF16;
    run.stage = 0;
    run.weights = true;  // cut
    const Outcome want = run_ranks(run, ranks);
    run.stage = 1;
    run.optimizer = run.gradients = true;
    expect_same(run, ranks, run_ranks(run, ranks), want);
  }
}

// Machines of which each adds up its ranks' gradients first: other bits than one by one, the same in every
// stage and tier, and within the bounds of one rank.
TEST(Ranks, OfSeveralMachinesAddUpInTwoLevels) {
  for (const int nodes : {2, 3}) {
    for (const DType gradients : {DType::kF32, DType::kBF16}) {
      for (const bool lora : {false, true}) {
        Variant run;
        run.dtype = DType::kF32;
        run.gradient_dtype = gradients;
        run.lora = lora;
        run.micro_batches = 6;
        run.steps = 6;
        run.stage = 0;
        run.nodes = nodes;
        const Outcome want = run_ranks(run, 6);
        for (const int64_t stage : {1, 3}) {
          Variant other = run;
          other.stage = stage;
          other.optimizer = other.gradients = stage == 3;
          expect_same(other, 6, run_ranks(other, 6), want);
        }
        Variant flat = run;
        flat.nodes = 1;
        if (gradients == DType::kBF16) continue;  // the last rounding hides the order
        EXPECT_NE(run_ranks(flat, 6).norms, want.norms) << run.text();
        const Outcome one = run_ranks(flat, 1);
        for (size_t s = 0; s < one.losses.size(); ++s)
          EXPECT_LE(relative(want.losses[s], one.losses[s]), 1e-6) << "step " << s + 1 << " " << run.text();
        EXPECT_LE(weights_apart(want.state, one.state), 1e-4) << run.text();
      }
    }
  }
}

// Shards inside machines, with copies on the others, in every tier.
TEST(Ranks, OfMachinesShardsGiveTheSameBits) {
  constexpr Row kOfMachines = {3, 5, 3, 3, 2, 2, 2, 2, 2};  // 2 x 2, 2 x 3 or 3 x 2 ranks; stages 1 to 3
  const std::vector<Row> rows = pairwise<kFactors>(kOfMachines, 47);
  for (const Row& row : std::span(rows).first(test::counts<size_t>(8, rows.size()))) {
    const int ranks = row[kRanks] == 0 ? 4 : 6;
    Variant run = shards_variant(row);
    run.steps = 4;
    run.stage = static_cast<int64_t>(row[kStage]) + 1;
    run.micro_batches = ranks * (row[kMicro] == 1 ? 2 : 1);
    run.nodes = row[kRanks] == 2 ? 3 : 2;
    run.among = ZeroGroup::kMachine;
    Variant first = run;
    first.stage = 0, first.among = ZeroGroup::kAll;
    first.optimizer = first.weights = first.gradients = first.mixed = false;
    first.slots_on_device = first.on_host = false, first.host = 0;
    const Outcome want = run_ranks(first, ranks);
    expect_same(run, ranks, run_ranks(run, ranks), want);
    run.among = ZeroGroup::kAll;
    expect_same(run, ranks, run_ranks(run, ranks), want);
    if (HasFailure()) return;
  }
}

// Codes, stochastic rounding, statistics: each copy of a shard takes the same step.
TEST(Ranks, OfMachinesEveryRuleGivesTheSameBits) {
  for (size_t rule = 0; rule < Rules::kSize; ++rule) {
    Variant run;
    run.rule = static_cast<RuleId>(rule);
    run.lora = rule % 2 == 1;
    run.master = static_cast<Master>(rule % 3);
    run.gradient_dtype = rule % 4 < 2 ? DType::kF32 : DType::kBF16;
    run.micro_batches = 4;
    run.steps = 3;
    run.stage = 0, run.nodes = 2;
    const Outcome want = run_ranks(run, 4);
    run.stage = static_cast<int64_t>(rule % 3) + 1;
    run.among = ZeroGroup::kMachine;
    run.optimizer = rule % 2 == 0;
    expect_same(run, 4, run_ranks(run, 4), want);
  }
}

// Updates inside backward; and a machine for each rank, of which none has shards.
TEST(Ranks, OfMachinesUpdatesInsideBackwardGiveTheSameBits) {
  for (const int nodes : {2, 4}) {
    for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
      Variant run;
      run.clip = clip;
      run.micro_batches = 4;
      run.steps = 3;
      run.stage = 0, run.nodes = nodes;
      const Outcome want = run_ranks(run, 4);
      run.in_backward = nodes == 2;
      run.among = ZeroGroup::kMachine;
      run.stage = nodes == 2 ? 3 : 1;
      run.optimizer = clip == Clip::kBlock;
      expect_same(run, 4, run_ranks(run, 4), want);
    }
  }
}

}  // namespace
}  // namespace lm
