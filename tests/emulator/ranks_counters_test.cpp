// What sharing a step asks of a GPU and of its host, counted on the emulator: NCCL's calls, and nothing that
// a step of one rank does not ask for besides.
#include <gtest/gtest.h>

#include "tests/emulator/emulator.h"
#include "tests/support/gpu_ranks.h"
#include "tests/train/offloaded_run.h"

namespace lm {
namespace {

using namespace offloaded_run;

Variant small_run(int64_t stage) {
  Variant run;
  run.micro_batches = 2;
  run.recompute = true;
  run.group = 2;
  run.layers = 4;
  run.stage = stage;
  return run;
}

// Of the third step.
emulator::Counters count_step(Training& training) {
  training.step(1);
  training.step(2);
  emulator::reset_counters();
  training.step(3);
  return emulator::counters();
}

TEST(RanksCounters, AStepWaitsOnceAllocatesNothingAndMovesEachUnitOnce) {
  for (const int64_t stage : {0, 1, 2, 3}) {
    expect_good_ends(with_gpus({.ranks = 2}, [&](GpuRank& rank) {
      Training training(small_run(stage), {}, {}, &rank.peers, &rank.group);
      const auto units = std::ssize(training.reduced_units());
      const emulator::Counters step = count_step(training);
      EXPECT_EQ(step.host_waits, 1) << "stage " << stage;
      EXPECT_EQ(step.allocations, 0) << "stage " << stage;
      EXPECT_EQ(step.pageable_copies, 0) << "stage " << stage;
      // A unit's exchange; then the sums, or with shards the norms and the new weights.
      const int64_t calls = (stage == 0 ? 2 : 3) * units;
      // And each layer's weights, forward and backward, but for those that are still in one of three slots.
      const int64_t gathers = stage == 3 ? step.collectives - calls : 0;
      EXPECT_EQ(step.collectives, calls + gathers) << "stage " << stage;
      if (stage == 3) {
        EXPECT_GT(gathers, 0);
        EXPECT_LE(gathers, 2 * 4);
      }
    }));
  }
}

// So that what its connections want is missed before a model is loaded.
TEST(RanksCounters, AGroupThatHasStartedHasReachedItsNeighbours) {
  expect_good_ends(with_gpus({.ranks = 2}, [](GpuRank&) {
    EXPECT_EQ(emulator::counters().collectives, 2);  // an all-gather, and sends and receives
  }));
}

TEST(RanksCounters, OneRankAsksForNothingOfAllThat) {
  expect_good_ends(with_gpus({.ranks = 1}, [](GpuRank&) {
    Training alone(small_run(3));
    const emulator::Counters step = count_step(alone);
    EXPECT_EQ(step.host_waits, 1);
    EXPECT_EQ(step.collectives, 0);
  }));
}

}  // namespace
}  // namespace lm
