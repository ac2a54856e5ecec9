#include "schedule/transfers.h"

#include <gtest/gtest.h>

#include <random>

namespace lm {
namespace {

using Kind = OperationKind;

std::string text(const StepSchedule& schedule) {
  std::string out;
  for (const Operation& op : schedule.operations) {
    if (op.kind == Kind::kFetch || op.kind == Kind::kClaim || op.kind == Kind::kWriteBack) {
      out += std::string(1, "fcw"[static_cast<int>(op.kind) - static_cast<int>(Kind::kFetch)]) +
             std::to_string(op.array) + ">" + std::to_string(op.slot) + " ";
    } else if (op.kind == Kind::kForward || op.kind == Kind::kBackward || op.kind == Kind::kUpdate) {
      out += std::string(operation_name(op.kind)) + std::to_string(op.block) +
             (op.segment < 0 ? "" : std::string(1, static_cast<char>('a' + op.segment))) + "." +
             std::to_string(op.micro) + " ";
    }
  }
  return out;
}

TransferShape stream(Pool pool, std::vector<char> arrays, int64_t slots, int64_t layers) {
  TransferShape shape;
  shape.layers = layers;
  shape.pool(pool) = {std::move(arrays), slots};
  return shape;
}

TEST(Transfers, LeaveAListAsItIsWhenEverythingIsAtHome) {
  const StepSchedule step = make_schedule({.layers = 3, .micro_batches = 2});
  const TransferShape shape;
  SlotState state(shape);
  EXPECT_EQ(add_transfers(step, step, shape, state).operations, step.operations);
}

TEST(Transfers, FetchFrozenWeightsAheadAndKeepWhatTheTurnNeeds) {
  const ScheduleShape run{.layers = 4};
  const TransferShape shape = stream(Pool::kWeights, {0, 1, 1, 1, 1, 0}, 2, 4);
  StepSchedule step = make_schedule(run);
  std::erase_if(step.operations, [](const Operation& op) { return op.kind == Kind::kUpdate; });
  SlotState state(shape);
  // At the turn blocks 4 and 3 are still there; at the end 2 and 1, which the next forward begins with.
  EXPECT_EQ(text(add_transfers(step, step, shape, state)),
            "f1>0 f2>1 forward0.0 forward1.0 f3>0 forward2.0 f4>1 forward3.0 forward4.0 "
            "backward4.0 f2>1 backward3.0 f1>0 backward2.0 backward1.0 backward0.0 ");
  EXPECT_EQ(text(add_transfers(step, step, shape, state)),
            "forward0.0 forward1.0 f3>0 forward2.0 f4>1 forward3.0 forward4.0 "
            "backward4.0 f2>1 backward3.0 f1>0 backward2.0 backward1.0 backward0.0 ");
}

TEST(Transfers, StageTheNextStepsTilesUnderTheBackward) {
  ScheduleShape run{.layers = 1, .tiles = {0, 4, 0}};
  TransferShape shape = stream(Pool::kOptimizer, {1, 1, 1, 1}, 2, 1);
  shape.first_tile = {0, 0, 4, 4};
  SlotState state(shape);
  const StepSchedule first = make_schedule(run);
  run.pending = true;
  const StepSchedule then = make_schedule(run);
  EXPECT_EQ(text(add_transfers(first, then, shape, state)),
            "f0>0 f1>1 forward0.0 forward1.0 backward1.0 backward0.0 update0.0 update2.0 ");
  EXPECT_EQ(text(add_transfers(then, then, shape, state)),
            "forward0.0 update1.0 w0>0 f2>0 update1.1 w1>1 f3>1 update1.2 w2>0 f0>0 update1.3 w3>1 f1>1 "
            "forward1.0 backward1.0 backward0.0 update0.0 update2.0 ");
  EXPECT_EQ(text(add_transfers(make_flush_schedule(run), {}, shape, state)),
            "update1.0 w0>0 f2>0 update1.1 w1>1 f3>1 update1.2 update1.3 ");
}

TEST(Transfers, BringAnAccumulatedGradientBackAndDropASpentOne) {
  const ScheduleShape run{.layers = 2, .micro_batches = 2};
  const TransferShape shape = stream(Pool::kGradients, {0, 1, 1, 0}, 1, 2);
  SlotState state(shape);
  const StepSchedule step = make_schedule(run);
  const std::string steady =
      "c2>0 forward0.0 forward1.0 forward2.0 backward2.0 w2>0 c1>0 backward1.0 w1>0 f2>0 backward0.0 "
      "forward0.1 forward1.1 forward2.1 backward2.1 w2>0 f1>0 backward1.1 ";
  // The update of block 1 finds its gradient; block 2's comes back once more.
  EXPECT_EQ(text(add_transfers(step, step, shape, state)),
            steady + "backward0.1 update0.0 update1.0 f2>0 update2.0 c2>0 update3.0 ");
}

TEST(Transfers, ParkInputsUntilTheirBackward) {
  const ScheduleShape run{.layers = 3, .recompute = true};
  const TransferShape shape = stream(Pool::kActivations, {1, 1, 1, 1}, 2, 3);
  SlotState state(shape);
  const StepSchedule step = make_schedule(run);
  const StepSchedule moved = add_transfers(step, step, shape, state);
  EXPECT_EQ(
      text(moved),
      "c0>0 c1>1 forward0.0 w0>0 forward1.0 w1>1 c2>0 forward2.0 c3>1 forward3.0 f1>1 backward3.0 f0>0 "
      "backward2.0 backward1.0 c0>1 c1>0 backward0.0 update0.0 update1.0 update2.0 update3.0 update4.0 ");
}

TEST(Transfers, BringACutHeadsMatrixTwiceAndItsSumsOnce) {
  ScheduleShape run{
      .layers = 1, .micro_batches = 2, .group = 2, .segments = 3, .segment_tiles = {0, 1, 2, 3, 4}};
  TransferShape shape = stream(Pool::kWeights, {0, 0, 0, 1, 1, 1}, 2, 1);
  shape.group = 2;
  shape.segment_tiles = run.segment_tiles;
  const std::string begin = "forward0.0 forward0.1 forward1.0 forward1.1 forward2.0 forward2.1 ";
  StepSchedule frozen = make_schedule(run);
  std::erase_if(frozen.operations, [](const Operation& op) { return op.kind == Kind::kUpdate; });
  SlotState state(shape);
  const StepSchedule step = add_transfers(frozen, frozen, shape, state);
  EXPECT_EQ(
      text(step),
      "f3>0 f4>1 " + begin +
          "forward2a.0 forward2a.1 f5>0 forward2b.0 forward2b.1 f3>1 forward2c.0 forward2c.1 f4>0 "
          "backward2a.0 backward2a.1 f5>1 backward2b.0 backward2b.1 f3>0 backward2c.0 backward2c.1 f4>1 "
          "backward2.0 backward2.1 backward1.0 backward1.1 backward0.0 backward0.1 ");
  // The gradient: claimed, summed over both micro-batches, reduced where it lies, and back for the update.
  shape = stream(Pool::kGradients, {0, 0, 0, 1, 1, 1}, 1, 1);
  shape.group = 2;
  shape.segment_tiles = run.segment_tiles;
  SlotState slots(shape);
  EXPECT_EQ(
      text(add_transfers(make_schedule(run), make_schedule(run), shape, slots)),
      "c3>0 " + begin +
          "forward2a.0 forward2a.1 forward2b.0 forward2b.1 forward2c.0 forward2c.1 "
          "backward2a.0 backward2a.1 w3>0 c4>0 backward2b.0 backward2b.1 w4>0 c5>0 backward2c.0 "
          "backward2c.1 w5>0 f3>0 backward2.0 backward2.1 backward1.0 backward1.1 backward0.0 backward0.1 "
          "update0.0 update1.0 update2.3 update2a.0 f4>0 update2b.1 f5>0 update2c.2 c3>0 ");
}

TEST(Transfers, SendASegmentHomeBetweenItsUpdateAndItsLastUse) {
  const ScheduleShape run{
      .layers = 1, .tiles = {0, 0, 4}, .pending = true, .segments = 2, .segment_tiles = {0, 2, 3, 4}};
  TransferShape shape = stream(Pool::kWeights, {0, 0, 0, 1, 1}, 1, 1);
  shape.segment_tiles = run.segment_tiles;
  SlotState state(shape);
  const StepSchedule step = make_schedule(run);
  add_transfers(step, step, shape, state);
  // Both tiles of a segment and its forward find it in the slot; its new bytes go home once.
  EXPECT_EQ(
      text(add_transfers(step, step, shape, state)),
      "forward0.0 forward1.0 update2.3 forward2.0 update2a.0 update2a.1 w3>0 forward2a.0 f4>0 update2b.2 "
      "w4>0 forward2b.0 f3>0 backward2a.0 f4>0 backward2b.0 f3>0 backward2.0 backward1.0 backward0.0 "
      "update0.0 update1.0 ");
}

struct Case {
  ScheduleShape run;
  TransferShape shape;
};

Case random_case(std::mt19937& random) {
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  Case c;
  c.run = {.layers = draw(1, 5),
           .micro_batches = draw(1, 5),
           .tied = draw(0, 1) == 1,
           .recompute = draw(0, 1) == 1,
           .clip = static_cast<Clip>(draw(0, 2)),
           .group = draw(1, 3)};
  const auto blocks = static_cast<size_t>(c.run.layers + 2);
  c.shape.layers = c.run.layers;
  c.shape.group = c.run.group;
  if (!c.run.tied && draw(0, 1) == 1) c.run.segments = draw(1, 4);
  const auto inner = [&] {
    std::vector<char> streamed(blocks + static_cast<size_t>(c.run.segments), 0);
    for (size_t b = 1; b < streamed.size(); ++b)
      streamed[b] = static_cast<char>(b + 1 != blocks && draw(0, 2) > 0);
    return streamed;
  };
  if (draw(0, 1) == 1) c.shape.pool(Pool::kWeights) = {inner(), draw(1, 4)};
  if (draw(0, 1) == 1) c.shape.pool(Pool::kGradients) = {inner(), draw(1, 4)};
  if (draw(0, 1) == 1 && c.run.recompute) {
    c.shape.pool(Pool::kActivations) = {
        std::vector<char>(static_cast<size_t>((c.run.layers + 1) * c.run.group), 1), draw(2, 5)};
  }
  c.shape.first_tile.push_back(0);
  PoolShape& optimizer = c.shape.pool(Pool::kOptimizer);
  optimizer.slots = draw(0, 4);
  for (size_t b = 0; b < blocks; ++b) {
    int64_t tiles = optimizer.slots > 0 ? draw(0, 3) : 0;
    bool far = tiles > 0;
    if (c.run.cut(static_cast<int64_t>(b))) {
      // At least a tile in each segment, wherever it is.
      c.run.segment_tiles.push_back(0);
      for (int64_t s = 0; s <= c.run.segments; ++s)
        c.run.segment_tiles.push_back(c.run.segment_tiles.back() + draw(1, 2));
      tiles = c.run.segment_tiles.back();
      far = optimizer.slots > 0 && draw(0, 1) == 1;
    }
    for (int64_t t = 0; t < tiles; ++t)
      optimizer.streamed.push_back(static_cast<char>(far && (t + 1 == tiles || draw(0, 1) == 1)));
    c.run.tiles.push_back(far ? tiles : 0);
    c.shape.first_tile.push_back(c.shape.first_tile.back() + tiles);
  }
  c.shape.tiles = c.run.tiles;
  c.shape.segment_tiles = c.run.segment_tiles;
  return c;
}

TEST(Transfers, KeepEveryRuleOverManyStepsOfRandomRuns) {
  std::mt19937 random(20);
  for (int i = 0; i < 2000; ++i) {
    Case c = random_case(random);
    SlotState state(c.shape);
    for (int step = 0; step < 4; ++step) {
      c.run.pending = step > 0 && c.run.defers();
      // A step may differ in length from what was expected.
      ScheduleShape expected = c.run;
      expected.pending = c.run.defers();
      ScheduleShape now = c.run;
      if (step == 2) now.micro_batches = 1 + (c.run.micro_batches + i) % 5;
      const StepSchedule list = make_schedule(now);
      ASSERT_EQ(schedule_fault(list, now), "") << "case " << i << " step " << step;
      const SlotState before = state;
      const StepSchedule moved = add_transfers(list, make_schedule(expected), c.shape, state);
      ASSERT_EQ(transfer_fault(moved, c.shape, before), "")
          << "case " << i << " step " << step << text(moved);
    }
    c.run.pending = c.run.defers();
    const SlotState before = state;
    const StepSchedule flush = add_transfers(make_flush_schedule(c.run), {}, c.shape, state);
    ASSERT_EQ(transfer_fault(flush, c.shape, before), "") << "case " << i;
  }
}

TEST(Transfers, AreFoundFaultyWhenOneIsMissingOrLate) {
  std::mt19937 random(7);
  int mutants = 0, caught = 0;
  for (int i = 0; i < 300; ++i) {
    const Case c = random_case(random);
    SlotState state(c.shape);
    const SlotState before = state;
    const StepSchedule list = make_schedule(c.run);
    const StepSchedule good = add_transfers(list, list, c.shape, state);
    for (size_t k = 0; k < good.operations.size(); ++k) {
      const Kind kind = good.operations[k].kind;
      if (kind != Kind::kFetch && kind != Kind::kClaim) continue;
      StepSchedule bad = good;
      bad.operations.erase(bad.operations.begin() + static_cast<std::ptrdiff_t>(k));
      // What is fetched for the next step is missed only there.
      const StepSchedule rest{
          {good.operations.begin() + static_cast<std::ptrdiff_t>(k) + 1, good.operations.end()}};
      bool used = false;
      for (const ArrayUse& use : array_uses(rest, good.operations[k].pool, c.shape))
        used = used || use.array == good.operations[k].array;
      if (!used) continue;
      ++mutants;
      caught += !transfer_fault(bad, c.shape, before).empty();
    }
  }
  EXPECT_GT(mutants, 500);
  EXPECT_EQ(caught, mutants);
}

}  // namespace
}  // namespace lm
