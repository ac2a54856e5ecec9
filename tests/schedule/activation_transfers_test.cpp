// Activations that live off the device: when they leave, when they come back, and when they end.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "schedule/transfers.h"
#include "transfer_text.h"

namespace lm {
namespace {

TEST(Transfers, ParkInputsUntilTheirBackward) {
  const StepConfig run{.units = schedule_units(3), .recompute = Recompute::kBlock};
  const StepConfig shape = stream(Pool::kActivations, {1, 1, 1, 1}, 2, run);
  SlotState state(shape);
  const StepSchedule step = make_schedule(run);
  const StepSchedule moved = add_transfers(step, step, shape, state);
  EXPECT_EQ(
      text(moved),
      "c0>0 c1>1 forward0.0 w0>0 forward1.0 w1>1 c2>0 forward2.0 c3>1 forward3.0 f1>1 backward3.0 f0>0 "
      "backward2.0 backward1.0 c0>1 c1>0 backward0.0 update0.0 update1.0 update2.0 update3.0 update4.0 ");
}

// An array is written back when its block's forward has added what it keeps, and comes back for its backward.
TEST(Transfers, ParkWhatBlocksKeepBehindTheirInputs) {
  const StepConfig run{.units = schedule_units(3), .recompute = Recompute::kNone};
  const StepConfig shape = stream(Pool::kActivations, {1, 1, 1, 1}, 2, run);
  SlotState state(shape);
  const StepSchedule step = make_schedule(run);
  EXPECT_EQ(
      text(add_transfers(step, step, shape, state)),
      "c0>0 c1>1 forward0.0 forward1.0 w0>0 c2>0 forward2.0 w1>1 c3>1 forward3.0 f1>1 backward3.0 f0>0 "
      "backward2.0 backward1.0 c0>1 c1>0 backward0.0 update0.0 update1.0 update2.0 update3.0 update4.0 ");
}

// At every level an array is there when it is needed, and nobody wants it after the last backward, of one or
// of two.
TEST(Transfers, KeptActivationsEndWithTheLastBackwardThatReadsThem) {
  constexpr Recompute kBlock = Recompute::kBlock;
  for (const RecomputeChoice level :
       {RecomputeChoice(Recompute::kNone), {Recompute::kAttention}, {kBlock, 2}, {kBlock, 3}, {kBlock}}) {
    for (const bool twice : {false, true}) {
      StepConfig run{.units = schedule_units(6),
                     .micro_batches = 2,
                     .recompute = level,
                     .group = 2,
                     .in_backward = twice};
      run.pool(Pool::kActivations) = {std::vector<char>(14, 1), 3};
      std::vector<char> alive(14, 0);
      const StepSchedule step = make_schedule(run);
      for (const ArrayUse& use : array_uses(step, Pool::kActivations, run)) {
        char& one = alive.at(static_cast<size_t>(use.array));
        EXPECT_EQ(one != 0, use.needs) << use.begin;
        one = use.dies ? 0 : 1;
      }
      EXPECT_EQ(std::ranges::count(alive, 1), 0) << static_cast<int>(level.level) << level.every << twice;
    }
  }
}

// Before the first trained block an input ends when the next one is there, so they take two places in turns.
TEST(Transfers, TakeTwoPlacesForTheInputsOfFrozenBlocks) {
  for (const int64_t group : {1, 2, 5}) {
    for (const int64_t first : {0, 1, 2, 3, 5, 7}) {  // 7: the head alone is trained
      SCOPED_TRACE("group " + std::to_string(group) + ", first " + std::to_string(first));
      StepConfig run{
          .units = schedule_units(6), .micro_batches = 5, .recompute = Recompute::kBlock, .group = group};
      run.first_trained = first;
      const int64_t places = InputPlaces{first}.place(7) + 1;
      EXPECT_EQ(places, first <= 3 ? 7 : first == 5 ? 5 : 3);
      run.pool(Pool::kActivations) = {std::vector<char>(static_cast<size_t>(places * group), 1), 3};
      std::vector<char> alive(static_cast<size_t>(places * group), 0);
      const StepSchedule step = make_schedule(run);
      for (const ArrayUse& use : array_uses(step, Pool::kActivations, run)) {
        char& one = alive.at(static_cast<size_t>(use.array));
        EXPECT_EQ(one != 0, use.needs) << use.begin;
        one = use.dies ? 0 : 1;
      }
      EXPECT_EQ(std::ranges::count(alive, 1), 0);
    }
  }
}

TEST(Transfers, BringABlocksInputToNoSegment) {
  const StepConfig run{
      .units = schedule_units(1, 2), .micro_batches = 2, .recompute = Recompute::kBlock, .group = 2};
  const StepConfig shape = stream(Pool::kActivations, {1, 1, 1, 1}, 3, run);
  const StepSchedule step = make_schedule(run);
  int norm = 0;
  for (const ArrayUse& use : array_uses(step, Pool::kActivations, shape)) {
    const UnitRole role = run.unit(step.operations[use.begin].unit).role;
    EXPECT_NE(role, UnitRole::kVocabularySegment);
    norm += role == UnitRole::kFinalNorm;
  }
  EXPECT_EQ(norm, 4);  // both ways, of both micro-batches
}

}  // namespace
}  // namespace lm
