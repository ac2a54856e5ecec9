#include "schedule/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace lm {
namespace {

using Kind = OperationKind;

std::string text(const StepSchedule& schedule) {
  std::string out;
  for (const Operation& op : schedule.operations) {
    if (op.kind == Kind::kAcquire || op.kind == Kind::kRelease) continue;
    out += std::string(operation_name(op.kind)) + std::to_string(op.block) +
           (op.segment < 0 ? "" : std::string(1, static_cast<char>('a' + op.segment))) + "." +
           std::to_string(op.micro) + " ";
  }
  return out;
}

TEST(Schedule, IsTheStepAsTheDesignTellsIt) {
  EXPECT_EQ(text(make_schedule({.layers = 2, .micro_batches = 2})),
            "forward0.0 forward1.0 forward2.0 head3.0 backward2.0 backward1.0 backward0.0 "
            "forward0.1 forward1.1 forward2.1 head3.1 reduce3.0 backward2.1 reduce2.0 backward1.1 reduce1.0 "
            "backward0.1 reduce0.0 check0.0 update0.0 update1.0 update2.0 update3.0 ");
}

TEST(Schedule, UpdatesABlockAtItsReduceWhenClippingIsNotGlobal) {
  EXPECT_EQ(text(make_schedule({.layers = 1, .recompute = true, .clip = Clip::kBlock})),
            "forward0.0 forward1.0 head2.0 reduce2.0 update2.0 recompute1.0 backward1.0 reduce1.0 update1.0 "
            "backward0.0 reduce0.0 update0.0 check0.0 ");
}

TEST(Schedule, LetsAGroupPassABlockBeforeTheNext) {
  EXPECT_EQ(
      text(make_schedule({.layers = 1, .micro_batches = 3, .recompute = true, .group = 2})),
      "forward0.0 forward0.1 forward1.0 forward1.1 head2.0 head2.1 "
      "recompute1.0 backward1.0 recompute1.1 backward1.1 backward0.0 backward0.1 "
      "forward0.2 forward1.2 head2.2 reduce2.0 recompute1.2 backward1.2 reduce1.0 backward0.2 reduce0.0 "
      "check0.0 update0.0 update1.0 update2.0 ");
}

TEST(Schedule, LendsATiedHeadTheEmbedding) {
  const std::vector<Operation> ops = make_schedule({.layers = 1, .tied = true}).operations;
  const auto head =
      std::find_if(ops.begin(), ops.end(), [](const Operation& op) { return op.kind == Kind::kHead; });
  ASSERT_NE(head, ops.end());
  EXPECT_EQ(*(head - 2), (Operation{Kind::kAcquire, 0, 0}));
  EXPECT_EQ(*(head - 1), (Operation{Kind::kAcquire, 2, 0}));
  EXPECT_EQ(*(head + 1), (Operation{Kind::kRelease, 2, 0}));
  EXPECT_EQ(*(head + 2), (Operation{Kind::kRelease, 0, 0}));
}

TEST(Schedule, TakesACutHeadSegmentBySegment) {
  ScheduleShape shape{
      .layers = 1, .micro_batches = 2, .group = 2, .segments = 2, .segment_tiles = {0, 1, 2, 3}};
  EXPECT_EQ(
      text(make_schedule(shape)),
      "forward0.0 forward0.1 forward1.0 forward1.1 "
      "forward2.0 forward2.1 forward2a.0 forward2a.1 forward2b.0 forward2b.1 "
      "backward2a.0 backward2a.1 reduce2a.0 backward2b.0 backward2b.1 reduce2b.0 "
      "backward2.0 backward2.1 reduce2.0 backward1.0 backward1.1 reduce1.0 backward0.0 backward0.1 reduce0.0 "
      "check0.0 update0.0 update1.0 update2.2 update2a.0 update2b.1 ");
  // A deferred update comes right before the segment's forward.
  shape = {.layers = 1, .tiles = {0, 0, 4}, .pending = true, .segments = 2, .segment_tiles = {0, 2, 3, 4}};
  EXPECT_EQ(
      text(make_schedule(shape)),
      "forward0.0 forward1.0 update2.3 forward2.0 update2a.0 update2a.1 forward2a.0 update2b.2 forward2b.0 "
      "backward2a.0 reduce2a.0 backward2b.0 reduce2b.0 backward2.0 reduce2.0 backward1.0 reduce1.0 "
      "backward0.0 reduce0.0 check0.0 update0.0 update1.0 ");
  EXPECT_EQ(text(make_flush_schedule(shape)), "update2.3 update2a.0 update2a.1 update2b.2 ");
  shape.pending = false;
  EXPECT_EQ(text(make_evaluation_schedule(shape)),
            "forward0.0 forward1.0 forward2.0 forward2a.0 forward2b.0 ");
}

ScheduleShape random_shape(std::mt19937& random) {
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  ScheduleShape shape{.layers = draw(1, 5),
                      .micro_batches = draw(1, 5),
                      .tied = draw(0, 1) == 1,
                      .recompute = draw(0, 1) == 1,
                      .clip = static_cast<Clip>(draw(0, 2)),
                      .group = draw(1, 3)};
  if (shape.tied || draw(0, 2) == 0) return shape;
  shape.segments = draw(1, 4);
  if (draw(0, 3) == 0) return shape;  // frozen
  shape.segment_tiles.push_back(0);
  for (int64_t s = 0; s <= shape.segments; ++s)
    shape.segment_tiles.push_back(shape.segment_tiles.back() + draw(1, 3));
  return shape;
}

// As a step under global clipping that follows another one.
ScheduleShape deferring(ScheduleShape shape, std::mt19937& random) {
  for (int64_t b = 0; b <= shape.layers + 1; ++b)
    shape.tiles.push_back(std::uniform_int_distribution<int>(0, 2)(random));
  if (shape.segments > 0) {
    const bool far = !shape.segment_tiles.empty() && random() % 2 == 0;
    shape.tiles.back() = far ? shape.segment_tiles.back() : 0;
  }
  shape.pending = shape.defers();
  return shape;
}

TEST(Schedule, KeepsItsRulesForEveryShape) {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    const ScheduleShape shape = random_shape(random);
    EXPECT_EQ(schedule_fault(make_schedule(shape), shape), "");
    EXPECT_EQ(evaluation_fault(make_evaluation_schedule(shape), shape), "");
    EXPECT_NE(evaluation_fault(make_schedule(shape), shape), "");
    const ScheduleShape later = deferring(shape, random);
    EXPECT_EQ(schedule_fault(make_schedule(later), later), "");
  }
}

TEST(Schedule, IsRefusedWithAnyOperationMissingOrTwice) {
  std::mt19937 random(2);
  for (int i = 0; i < 40; ++i) {
    ScheduleShape shape = random_shape(random);
    if (i % 2 == 1) shape = deferring(shape, random);
    const StepSchedule good = make_schedule(shape);
    for (size_t at = 0; at < good.operations.size(); ++at) {
      StepSchedule missing = good, twice = good;
      missing.operations.erase(missing.operations.begin() + static_cast<long>(at));
      twice.operations.insert(twice.operations.begin() + static_cast<long>(at), good.operations[at]);
      EXPECT_NE(schedule_fault(missing, shape), "") << "without " << operation_name(good.operations[at].kind);
      EXPECT_NE(schedule_fault(twice, shape), "") << "twice " << operation_name(good.operations[at].kind);
    }
  }
}

TEST(Schedule, IsRefusedWithAnOperationOnAnotherBlockOrMicroBatch) {
  std::mt19937 random(3);
  for (int i = 0; i < 40; ++i) {
    const ScheduleShape shape = random_shape(random);
    const StepSchedule good = make_schedule(shape);
    for (size_t at = 0; at < good.operations.size(); ++at) {
      const Kind kind = good.operations[at].kind;
      StepSchedule bad = good;
      bad.operations[at].block = (bad.operations[at].block + 1) % (shape.layers + 2);
      if (kind != Kind::kCheck) {
        EXPECT_NE(schedule_fault(bad, shape), "") << operation_name(kind);
      }
      const bool of_micro = kind == Kind::kForward || kind == Kind::kHead || kind == Kind::kRecompute ||
                            kind == Kind::kBackward;
      if (!of_micro) continue;
      bad = good;
      bad.operations[at].micro = (bad.operations[at].micro + 1) % (shape.micro_batches + 1);
      EXPECT_NE(schedule_fault(bad, shape), "") << operation_name(kind);
      // Another segment, the block's rest among them, or one that there is not.
      if (bad.operations[at].block != shape.layers + 1) continue;
      bad = good;
      bad.operations[at].segment = (bad.operations[at].segment + 2) % (shape.segments + 1) - 1;
      if (shape.segments == 0) bad.operations[at].segment = 0;
      EXPECT_NE(schedule_fault(bad, shape), "") << operation_name(kind);
    }
  }
}

// Moves the first operation that matches to the place before the first that matches `before`.
StepSchedule moved(StepSchedule schedule, const Operation& what, const Operation& before) {
  auto& ops = schedule.operations;
  const auto from = std::find(ops.begin(), ops.end(), what);
  EXPECT_NE(from, ops.end());
  ops.erase(from);
  const auto to = std::find(ops.begin(), ops.end(), before);
  EXPECT_NE(to, ops.end());
  ops.insert(to, what);
  return schedule;
}

TEST(Schedule, IsRefusedOutOfOrder) {
  const ScheduleShape shape{.layers = 3, .micro_batches = 2, .tied = true, .recompute = true};
  const StepSchedule good = make_schedule(shape);
  const auto fault = [&](const Operation& what, const Operation& before) {
    return schedule_fault(moved(good, what, before), shape);
  };
  EXPECT_NE(fault({Kind::kUpdate, 0, 0}, {Kind::kCheck, 0, 0}).find("before the check"), std::string::npos);
  EXPECT_NE(fault({Kind::kUpdate, 2, 0}, {Kind::kUpdate, 1, 0}).find("forward order"), std::string::npos);
  EXPECT_NE(fault({Kind::kReduce, 2, 0}, {Kind::kBackward, 2, 1}).find("backward"), std::string::npos);
  // The tied matrix's gradient is complete with its rows only.
  EXPECT_NE(fault({Kind::kReduce, 0, 0}, {Kind::kBackward, 0, 1}).find("before its last"), std::string::npos);
  EXPECT_NE(fault({Kind::kBackward, 1, 0}, {Kind::kBackward, 2, 0}), "");
  EXPECT_NE(fault({Kind::kRecompute, 2, 1}, {Kind::kAcquire, 3, 1}), "");
  EXPECT_NE(fault({Kind::kForward, 2, 0}, {Kind::kForward, 1, 0}), "");
  EXPECT_NE(fault({Kind::kCheck, 0, 0}, {Kind::kReduce, 0, 0}).find("every gradient"), std::string::npos);
}

TEST(Schedule, IsRefusedWithSegmentsOutOfOrder) {
  const ScheduleShape shape{
      .layers = 1, .micro_batches = 2, .group = 2, .segments = 3, .segment_tiles = {0, 1, 2, 3, 4}};
  const StepSchedule good = make_schedule(shape);
  ASSERT_EQ(schedule_fault(good, shape), "");
  // Exchanges all that is done with two segments of a pass.
  const auto exchanged = [&](Kind kind, int64_t a, int64_t b) {
    StepSchedule bad = good;
    const auto turn = [&](Operation& op) {
      op.segment = op.segment == a ? b : op.segment == b ? a : op.segment;
    };
    for (size_t i = 1; i + 1 < bad.operations.size(); ++i) {
      if (bad.operations[i].kind != kind || bad.operations[i].segment < 0) continue;
      turn(bad.operations[i]);
      if (good.operations[i - 1].kind == Kind::kAcquire) turn(bad.operations[i - 1]);
      if (good.operations[i + 1].kind == Kind::kRelease) turn(bad.operations[i + 1]);
    }
    return schedule_fault(bad, shape);
  };
  for (const auto& [a, b] : {std::pair(0, 1), std::pair(1, 2), std::pair(0, 2)}) {
    EXPECT_NE(exchanged(Kind::kForward, a, b), "") << a << b;
    EXPECT_NE(exchanged(Kind::kBackward, a, b), "") << a << b;
  }
  const auto fault = [&](const Operation& what, const Operation& before) {
    return schedule_fault(moved(good, what, before), shape);
  };
  EXPECT_NE(fault({Kind::kBackward, 2, 0, 0}, {Kind::kForward, 2, 0, 2}), "");
  EXPECT_NE(fault({Kind::kReduce, 2, 0, 1}, {Kind::kBackward, 2, 1, 1}), "");
  EXPECT_NE(fault({Kind::kUpdate, 2, 2, 2}, {Kind::kUpdate, 2, 1, 1}), "");
}

}  // namespace
}  // namespace lm
