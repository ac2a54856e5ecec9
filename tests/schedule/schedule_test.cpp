#include "schedule/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "base/error.h"
#include "tests/support/oracles/schedule_fault.h"
#include "units.h"

namespace lm {
namespace {

using Kind = OperationKind;

std::string text(const StepSchedule& schedule) {
  std::string out;
  for (const Operation& op : schedule.operations) {
    if (op.kind == Kind::kAcquire || op.kind == Kind::kRelease) continue;
    out += std::string(operation_name(op.kind)) + std::to_string(op.unit) + "." +
           std::to_string(op.kind == Kind::kUpdate ? op.tile : op.micro) + " ";
  }
  return out;
}

TEST(Schedule, IsTheStepAsTheDesignTellsIt) {
  EXPECT_EQ(text(make_schedule({.units = schedule_units(2), .micro_batches = 2})),
            "forward0.0 forward1.0 forward2.0 head3.0 backward2.0 backward1.0 backward0.0 "
            "forward0.1 forward1.1 forward2.1 head3.1 norm3.0 backward2.1 norm2.0 backward1.1 norm1.0 "
            "backward0.1 add rows0.0 norm0.0 check0.0 update0.0 update1.0 update2.0 update3.0 ");
}

TEST(Schedule, UpdatesABlockAtItsNormWhenClippingIsNotGlobal) {
  EXPECT_EQ(
      text(make_schedule({.units = schedule_units(1), .recompute = Recompute::kBlock, .clip = Clip::kBlock})),
      "forward0.0 forward1.0 head2.0 norm2.0 update2.0 recompute1.0 backward1.0 norm1.0 update1.0 "
      "backward0.0 add rows0.0 norm0.0 update0.0 check0.0 ");
}

// Of a run that freezes the lower layers: nothing goes back below the first trained block.
TEST(Schedule, HasNoBackwardBelowTheFirstTrainedBlock) {
  StepConfig shape{.units = schedule_units(3), .recompute = Recompute::kBlock, .first_trained = 2};
  for (size_t u = 0; u < 2; ++u) shape.units[u].end_tile = 0;
  EXPECT_EQ(text(make_schedule(shape)),
            "forward0.0 forward1.0 forward2.0 forward3.0 head4.0 norm4.0 recompute3.0 backward3.0 norm3.0 "
            "recompute2.0 backward2.0 norm2.0 check0.0 update2.0 update3.0 update4.0 ");
  shape.clip = Clip::kBlock;
  shape.micro_batches = 2;
  shape.recompute = Recompute::kNone;
  EXPECT_EQ(text(make_schedule(shape)),
            "forward0.0 forward1.0 forward2.0 forward3.0 head4.0 backward3.0 backward2.0 "
            "forward0.1 forward1.1 forward2.1 forward3.1 head4.1 norm4.0 update4.0 "
            "backward3.1 norm3.0 update3.0 backward2.1 norm2.0 update2.0 check0.0 ");
  for (const bool in_backward : {false, true}) {
    for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
      StepConfig whole{.units = schedule_units(3, 2), .micro_batches = 2, .recompute = Recompute::kBlock};
      whole.clip = clip;
      whole.group = 2;
      whole.in_backward = in_backward;
      StepConfig upper = whole;
      upper.first_trained = 2;
      for (size_t u = 0; u < 2; ++u) upper.units[u].end_tile = 0;
      EXPECT_EQ(schedule_fault(make_schedule(upper), upper), "");
      EXPECT_NE(schedule_fault(make_schedule(whole), upper), "");
    }
  }
  shape.first_trained = 4;
  for (size_t u = 2; u < 4; ++u) shape.units[u].end_tile = 0;
  EXPECT_EQ(text(make_schedule(shape)),
            "forward0.0 forward1.0 forward2.0 forward3.0 head4.0 "
            "forward0.1 forward1.1 forward2.1 forward3.1 head4.1 norm4.0 update4.0 check0.0 ");
}

// A gradient is complete with all ranks' parts, and only then has a norm; one rank has nobody to ask.
TEST(Schedule, ReducesEachGradientBetweenSeveralRanks) {
  const StepConfig alone{.units = schedule_units(1, 2), .micro_batches = 2, .clip = Clip::kBlock};
  StepConfig shape = alone;
  shape.ranks = 2;
  EXPECT_EQ(text(make_schedule(shape)),
            "forward0.0 forward1.0 forward2.0 forward3.0 forward4.0 "
            "backward3.0 backward4.0 backward2.0 backward1.0 backward0.0 "
            "forward0.1 forward1.1 forward2.1 forward3.1 forward4.1 "
            "backward3.1 exchange3.0 norm3.0 backward4.1 exchange4.0 norm4.0 "
            "backward2.1 exchange2.0 norm2.0 update2.2 update3.0 update4.1 "
            "backward1.1 exchange1.0 norm1.0 update1.0 "
            "backward0.1 add rows0.0 exchange0.0 norm0.0 update0.0 check0.0 ");
  EXPECT_NE(schedule_fault(make_schedule(shape), alone).find("nobody to exchange with"), std::string::npos);
  EXPECT_NE(schedule_fault(make_schedule(alone), shape).find("before its exchange"), std::string::npos);
}

TEST(Schedule, LetsAGroupPassABlockBeforeTheNext) {
  EXPECT_EQ(
      text(make_schedule(
          {.units = schedule_units(1), .micro_batches = 3, .recompute = Recompute::kBlock, .group = 2})),
      "forward0.0 forward0.1 forward1.0 forward1.1 head2.0 head2.1 "
      "recompute1.0 backward1.0 recompute1.1 backward1.1 backward0.0 backward0.1 "
      "forward0.2 forward1.2 head2.2 norm2.0 recompute1.2 backward1.2 norm1.0 backward0.2 add rows0.0 "
      "norm0.0 "
      "check0.0 update0.0 update1.0 update2.0 ");
}

TEST(Schedule, LendsATiedHeadTheEmbedding) {
  const std::vector<Operation> ops = make_schedule({.units = schedule_units(1), .tied = true}).operations;
  const auto head =
      std::find_if(ops.begin(), ops.end(), [](const Operation& op) { return op.kind == Kind::kHead; });
  ASSERT_NE(head, ops.end());
  EXPECT_EQ(*(head - 2), (Operation{Kind::kAcquire, 0, 0}));
  EXPECT_EQ(*(head - 1), (Operation{Kind::kAcquire, 2, 0}));
  EXPECT_EQ(*(head + 1), (Operation{Kind::kRelease, 2, 0}));
  EXPECT_EQ(*(head + 2), (Operation{Kind::kRelease, 0, 0}));
}

TEST(Schedule, TakesAChunkedHeadSegmentBySegment) {
  StepConfig shape{.units = schedule_units(1, 2), .micro_batches = 2, .group = 2};
  EXPECT_EQ(text(make_schedule(shape)),
            "forward0.0 forward0.1 forward1.0 forward1.1 "
            "forward2.0 forward2.1 forward3.0 forward3.1 forward4.0 forward4.1 "
            "backward3.0 backward3.1 norm3.0 backward4.0 backward4.1 norm4.0 "
            "backward2.0 backward2.1 norm2.0 backward1.0 backward1.1 norm1.0 "
            "backward0.0 backward0.1 add rows0.0 norm0.0 check0.0 update0.0 update1.0 update2.2 update3.0 "
            "update4.1 ");
  // A deferred update comes right before the segment's forward.
  shape = {.units = tiled_units(1, {0, 0, 4}, {2, 1, 1}), .pending = true};
  EXPECT_EQ(text(make_schedule(shape)),
            "forward0.0 forward1.0 update2.3 forward2.0 update3.0 update3.1 forward3.0 update4.2 forward4.0 "
            "backward3.0 norm3.0 backward4.0 norm4.0 backward2.0 norm2.0 backward1.0 norm1.0 "
            "backward0.0 add rows0.0 norm0.0 check0.0 update0.0 update1.0 ");
  EXPECT_EQ(text(make_flush_schedule(shape)), "update2.3 update3.0 update3.1 update4.2 ");
  shape.pending = false;
  EXPECT_EQ(text(make_evaluation_schedule(shape)), "forward0.0 forward1.0 forward2.0 forward3.0 forward4.0 ");
}

// The gradient of one block at a time; a norm over all of them needs a backward of its own.
TEST(Schedule, UpdatesABlockRightAfterItsBackward) {
  StepConfig shape{.units = tiled_units(1, {0, 2, 0}),
                   .micro_batches = 2,
                   .recompute = Recompute::kBlock,
                   .clip = Clip::kNone,
                   .group = 2,
                   .in_backward = true};
  const std::string forward = "forward0.0 forward0.1 forward1.0 forward1.1 ",
                    block = "recompute1.0 backward1.0 recompute1.1 backward1.1 ",
                    rows = "backward0.0 backward0.1 add rows0.0 ";
  EXPECT_EQ(text(make_schedule(shape)), forward + "head2.0 head2.1 norm2.0 update2.0 " + block +
                                            "norm1.0 update1.0 update1.1 " + rows +
                                            "norm0.0 update0.0 check0.0 ");
  shape.clip = Clip::kGlobal;
  const std::string measured =
      forward + "head2.0 head2.1 norm2.0 " + block + "norm1.0 " + rows + "norm0.0 check0.0 ";
  const std::string second =
      "head2.0 head2.1 update2.0 " + block + "update1.0 update1.1 " + rows + "update0.0 ";
  EXPECT_EQ(text(make_schedule(shape)), measured + second);
  EXPECT_FALSE(shape.defers());
  // The gradient is gone with the block's backward: nothing can wait for the next forward, wherever its state
  // lives.
  for (ScheduleUnit& unit : shape.units) unit.off_device = true;
  EXPECT_FALSE(shape.defers());
  EXPECT_EQ(text(make_schedule(shape)), measured + second);
  EXPECT_EQ(schedule_fault(make_schedule(shape), shape), "");
  for (ScheduleUnit& unit : shape.units) unit.off_device = false;
  // What a block's backward has overwritten is made once more.
  shape.recompute = Recompute::kNone, shape.ranks = 2;
  EXPECT_EQ(
      text(make_schedule(shape)),
      forward + "head2.0 head2.1 exchange2.0 norm2.0 backward1.0 backward1.1 exchange1.0 norm1.0 " + rows +
          "exchange0.0 norm0.0 check0.0 " + forward +
          "head2.0 head2.1 exchange2.0 update2.0 backward1.0 backward1.1 exchange1.0 update1.0 update1.1 " +
          rows + "exchange0.0 update0.0 ");
}

// After all activations and gradients of blocks, and before its rows.
TEST(Schedule, MakesATiedTablesGradientLast) {
  StepConfig shape{.units = schedule_units(1),
                   .micro_batches = 2,
                   .tied = true,
                   .recompute = Recompute::kBlock,
                   .clip = Clip::kBlock,
                   .group = 2,
                   .in_backward = true,
                   .defer_tied_gradient = true};
  EXPECT_EQ(text(make_schedule(shape)),
            "forward0.0 forward0.1 forward1.0 forward1.1 head2.0 head2.1 norm2.0 update2.0 "
            "recompute1.0 backward1.0 recompute1.1 backward1.1 norm1.0 update1.0 backward0.0 backward0.1 "
            "table gradient0.0 table gradient0.1 add rows0.0 norm0.0 update0.0 check0.0 ");
  shape.clip = Clip::kGlobal;  // its norm is wanted while block inputs wait for a second backward
  EXPECT_THROW(make_schedule(shape), Error);
  shape.clip = Clip::kNone, shape.tied = false;
  EXPECT_THROW(make_schedule(shape), Error);
}

RecomputeChoice drawn_level(int drawn) {
  const RecomputeChoice levels[] = {
      Recompute::kNone, Recompute::kAttention, {Recompute::kBlock, 2}, Recompute::kBlock};
  return levels[drawn];
}

StepConfig random_shape(std::mt19937& random) {
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  StepConfig shape{.units = schedule_units(draw(1, 5)),
                   .micro_batches = draw(1, 5),
                   .tied = draw(0, 1) == 1,
                   .recompute = drawn_level(draw(0, 3)),
                   .clip = static_cast<Clip>(draw(0, 2)),
                   .group = draw(1, 3),
                   .pending = false,
                   .ranks = draw(1, 2)};
  shape.in_backward = draw(0, 1) == 1;
  if (shape.in_backward) shape.group = std::max(shape.group, shape.micro_batches);
  shape.defer_tied_gradient = shape.tied && shape.in_backward && !shape.two_pass_clip() && draw(0, 1) == 1;
  if (shape.tied || draw(0, 2) == 0) return shape;
  const bool frozen = draw(0, 3) == 0;
  std::vector<int64_t> cut;
  for (int i = draw(1, 4); i >= 0; --i) cut.push_back(frozen ? 0 : draw(1, 3));
  shape.units = tiled_units(std::ssize(shape.units) - 2, std::vector<int64_t>(shape.units.size()), cut);
  return shape;
}

// As a step under global clipping that follows another one.
StepConfig deferring(StepConfig shape, std::mt19937& random) {
  bool head = false;
  for (ScheduleUnit& unit : shape.units) {
    const int64_t tiles = std::uniform_int_distribution<int>(0, 2)(random);
    if (unit.role == UnitRole::kFinalNorm) head = unit.tiles() > 0 && random() % 2 == 0;
    if (unit.role == UnitRole::kFinalNorm || unit.role == UnitRole::kVocabularySegment) {
      unit.off_device = head;
    } else {
      unit.off_device = tiles > 0;
      unit.end_tile = std::max<int64_t>(tiles, 1);
    }
  }
  shape.pending = shape.defers();
  return shape;
}

TEST(Schedule, KeepsItsRulesForEveryShape) {
  std::mt19937 random(1);
  for (int i = 0; i < 300; ++i) {
    const StepConfig shape = random_shape(random);
    EXPECT_EQ(schedule_fault(make_schedule(shape), shape), "");
    EXPECT_EQ(evaluation_fault(make_evaluation_schedule(shape), shape), "");
    EXPECT_NE(evaluation_fault(make_schedule(shape), shape), "");
    const StepConfig later = deferring(shape, random);
    EXPECT_EQ(schedule_fault(make_schedule(later), later), "");
  }
}

TEST(Schedule, IsRefusedWithAnyOperationMissingOrTwice) {
  std::mt19937 random(2);
  for (int i = 0; i < 40; ++i) {
    StepConfig shape = random_shape(random);
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
    const StepConfig shape = random_shape(random);
    const StepSchedule good = make_schedule(shape);
    for (size_t at = 0; at < good.operations.size(); ++at) {
      const Kind kind = good.operations[at].kind;
      StepSchedule bad = good;
      bad.operations[at].unit = (bad.operations[at].unit + 1) % std::ssize(shape.units);
      if (kind != Kind::kCheck) {
        EXPECT_NE(schedule_fault(bad, shape), "") << operation_name(kind);
      }
      const bool of_micro = kind == Kind::kForward || kind == Kind::kHead || kind == Kind::kRecompute ||
                            kind == Kind::kBackward || kind == Kind::kTableGradient;
      if (!of_micro) continue;
      bad = good;
      bad.operations[at].micro = (bad.operations[at].micro + 1) % (shape.micro_batches + 1);
      EXPECT_NE(schedule_fault(bad, shape), "") << operation_name(kind);
      bad = good;
      bad.operations[at].unit = std::ssize(shape.units);
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
  const StepConfig shape{
      .units = schedule_units(3), .micro_batches = 2, .tied = true, .recompute = Recompute::kBlock};
  const StepSchedule good = make_schedule(shape);
  const auto fault = [&](const Operation& what, const Operation& before) {
    return schedule_fault(moved(good, what, before), shape);
  };
  EXPECT_NE(fault({Kind::kUpdate, 0, 0}, {Kind::kCheck, 0, 0}).find("before the check"), std::string::npos);
  EXPECT_NE(fault({Kind::kUpdate, 2, 0}, {Kind::kUpdate, 1, 0}).find("forward order"), std::string::npos);
  EXPECT_NE(fault({Kind::kNorm, 2, 0}, {Kind::kBackward, 2, 1}).find("backward"), std::string::npos);
  // The tied matrix's gradient is complete with its rows only.
  EXPECT_NE(fault({Kind::kNorm, 0, 0}, {Kind::kBackward, 0, 1}).find("before its last"), std::string::npos);
  EXPECT_NE(fault({Kind::kBackward, 1, 0}, {Kind::kBackward, 2, 0}), "");
  EXPECT_NE(fault({Kind::kRecompute, 2, 1}, {Kind::kAcquire, 3, 1}), "");
  EXPECT_NE(fault({Kind::kForward, 2, 0}, {Kind::kForward, 1, 0}), "");
  EXPECT_NE(fault({Kind::kCheck, 0, 0}, {Kind::kNorm, 0, 0}).find("every gradient"), std::string::npos);
}

TEST(Schedule, IsRefusedWithTwoBlocksGradientsAtOnce) {
  for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
    StepConfig shape{
        .units = schedule_units(2), .micro_batches = 2, .clip = clip, .group = 2, .in_backward = true};
    const StepSchedule good = make_schedule(shape);
    ASSERT_EQ(schedule_fault(good, shape), "");
    const auto fault = [&](const StepConfig& of, const Operation& what, const Operation& before) {
      return schedule_fault(moved(make_schedule(of), what, before), of);
    };
    const Operation ended{clip == Clip::kGlobal ? Kind::kNorm : Kind::kUpdate, 2};
    EXPECT_NE(fault(shape, ended, {Kind::kBackward, 1, 1}).find("slot of another"), std::string::npos);
    EXPECT_NE(fault(shape, {ended.kind, 1}, {Kind::kNorm, 0}).find("slot of another"), std::string::npos);
    // A tied embedding's is complete at the end alone, and so has memory of its own.
    shape.tied = true;
    EXPECT_EQ(fault(shape, {ended.kind, 1}, {Kind::kNorm, 0}), "");
    shape.in_backward = false;
    const StepSchedule after = make_schedule(shape);
    shape.in_backward = true;
    EXPECT_NE(schedule_fault(after, shape) == "", clip == Clip::kGlobal);
    shape.group = 1;
    EXPECT_THROW(make_schedule(shape), Error);
  }
}

TEST(Schedule, IsRefusedWithATablesGradientBesideOthers) {
  StepConfig shape{.units = schedule_units(2),
                   .micro_batches = 2,
                   .tied = true,
                   .clip = Clip::kNone,
                   .group = 2,
                   .in_backward = true,
                   .defer_tied_gradient = true};
  const StepSchedule good = make_schedule(shape);
  ASSERT_EQ(schedule_fault(good, shape), "");
  const auto fault = [&](const Operation& what, const Operation& before) {
    return schedule_fault(moved(good, what, before), shape);
  };
  const Operation first{Kind::kTableGradient, 0, 0}, second{Kind::kTableGradient, 0, 1};
  EXPECT_NE(fault({Kind::kBackward, 0, 1}, second).find("beside activations"), std::string::npos);
  EXPECT_NE(fault({Kind::kUpdate, 1}, {Kind::kAddRows}).find("slot of another"), std::string::npos);
  EXPECT_NE(fault(second, first).find("ascend"), std::string::npos);
  EXPECT_NE(fault({Kind::kAddRows}, second).find("before the head's part"), std::string::npos);
  EXPECT_NE(fault({Kind::kUpdate, 0}, second), "");
  // Whoever makes it first does not know of this, and the other way round.
  StepConfig other = shape;
  other.defer_tied_gradient = false;
  EXPECT_NE(schedule_fault(good, other).find("only a tied table's"), std::string::npos);
  EXPECT_NE(schedule_fault(make_schedule(other), shape).find("before the head's part"), std::string::npos);
}

TEST(Schedule, IsRefusedWithAReduceScatterOutOfOrder) {
  const StepConfig shape{.units = schedule_units(3), .micro_batches = 2, .ranks = 2};
  const StepSchedule good = make_schedule(shape);
  ASSERT_EQ(schedule_fault(good, shape), "");
  const auto fault = [&](const Operation& what, const Operation& before) {
    return schedule_fault(moved(good, what, before), shape);
  };
  EXPECT_NE(fault({Kind::kNorm, 2, 0}, {Kind::kReduceScatter, 2, 0}).find("before its exchange"),
            std::string::npos);
  EXPECT_NE(fault({Kind::kReduceScatter, 2, 0}, {Kind::kBackward, 2, 1}).find("before its last"),
            std::string::npos);
}

// Ranks that have each updated a shard need the others' before anything uses the unit: after its last tile.
TEST(Schedule, GathersAUnitsWeightsBehindItsLastTile) {
  for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
    StepConfig shape{.units = tiled_units(2, {0, 2, 0, 0}), .clip = clip, .ranks = 2, .sharded = true};
    const StepSchedule good = make_schedule(shape);
    ASSERT_EQ(schedule_fault(good, shape), "");
    int64_t gathers = 0;
    for (size_t i = 0; i < good.operations.size(); ++i) {
      const Operation& op = good.operations[i];
      if (op.kind != Kind::kGather) continue;
      ++gathers;
      EXPECT_EQ(good.operations[i - 1],
                (Operation{Kind::kUpdate, op.unit, 0, shape.unit(op.unit).end_tile - 1}));
    }
    // Under global clipping block 1 is updated and gathered under the next step's forward.
    EXPECT_EQ(gathers, clip == Clip::kGlobal ? 3 : 4);
    const std::string flush = text(make_flush_schedule(
        {.units = shape.units, .clip = clip, .pending = true, .ranks = 2, .sharded = true}));
    EXPECT_EQ(flush, clip == Clip::kGlobal ? "update1.0 update1.1 gather1.0 " : "");
    StepSchedule missing = good;
    std::erase_if(missing.operations,
                  [](const Operation& op) { return op.kind == Kind::kGather && op.unit == 2; });
    EXPECT_NE(schedule_fault(missing, shape), "");
    EXPECT_NE(schedule_fault(moved(good, {Kind::kGather, 2}, {Kind::kUpdate, 2}), shape), "");
    shape.sharded = false;
    EXPECT_EQ(text(make_schedule(shape)).find("gather"), std::string::npos);
  }
}

// Of weights in shards a rank has nothing else to keep: whoever uses them gathers them.
TEST(Schedule, GathersNoWeightsThatStayInShards) {
  StepConfig shape{.units = schedule_units(2), .ranks = 2, .sharded = true};
  shape.units[1].in_shards = true;
  const StepSchedule good = make_schedule(shape);
  ASSERT_EQ(schedule_fault(good, shape), "");
  EXPECT_EQ(text(good).find("gather1"), std::string::npos);
  EXPECT_NE(text(good).find("gather2"), std::string::npos);
  StepConfig whole = shape;
  whole.units[1].in_shards = false;
  EXPECT_NE(schedule_fault(good, whole).find("never gathered"), std::string::npos);
  EXPECT_NE(schedule_fault(make_schedule(whole), shape).find("every rank has"), std::string::npos);
}

// A rank's part of a tied matrix's gradient is the head's and its rows: other ranks must be given both.
TEST(Schedule, AddsTheEmbeddingsRowsBeforeItsGradientIsReduced) {
  for (const bool tied : {false, true}) {
    const StepConfig shape{
        .units = schedule_units(2), .micro_batches = 3, .tied = tied, .group = 2, .ranks = 2};
    const StepSchedule good = make_schedule(shape);
    ASSERT_EQ(schedule_fault(good, shape), "");
    const auto at = std::find(good.operations.begin(), good.operations.end(), Operation{Kind::kAddRows});
    ASSERT_NE(at, good.operations.end());
    EXPECT_EQ(*(at - 1), (Operation{Kind::kBackward, 0, 2}));
    EXPECT_EQ(*(at + 1), (Operation{Kind::kReduceScatter}));
    const auto fault = [&](const Operation& what, const Operation& before) {
      return schedule_fault(moved(good, what, before), shape);
    };
    EXPECT_NE(fault({Kind::kReduceScatter}, {Kind::kAddRows}).find("exchanged before its rows"),
              std::string::npos);
    EXPECT_NE(fault({Kind::kAddRows}, {Kind::kHead, 3, 2}).find("before the last"), std::string::npos);
    EXPECT_NE(fault({Kind::kAddRows}, {Kind::kBackward, 0, 2}).find("before the last"), std::string::npos);
    StepConfig alone = shape;
    alone.ranks = 1;
    EXPECT_NE(schedule_fault(moved(make_schedule(alone), {Kind::kNorm}, {Kind::kAddRows}), alone)
                  .find("normed before its rows"),
              std::string::npos);
  }
}

TEST(Schedule, IsRefusedWithSegmentsOutOfOrder) {
  const StepConfig shape{.units = schedule_units(1, 3), .micro_batches = 2, .group = 2};
  const StepSchedule good = make_schedule(shape);
  ASSERT_EQ(schedule_fault(good, shape), "");
  // Exchanges all that is done with two segments of a pass.
  const auto exchanged = [&](Kind kind, int64_t a, int64_t b) {
    StepSchedule bad = good;
    const auto turn = [&](Operation& op) { op.unit = op.unit == a ? b : op.unit == b ? a : op.unit; };
    for (size_t i = 1; i + 1 < bad.operations.size(); ++i) {
      // A pass's end goes with it: what is left to see is the order.
      if (kind == Kind::kBackward && good.operations[i].kind == Kind::kNorm) turn(bad.operations[i]);
      if (good.operations[i].kind != kind || (good.operations[i].unit != a && good.operations[i].unit != b))
        continue;
      turn(bad.operations[i]);
      if (good.operations[i - 1].kind == Kind::kAcquire) turn(bad.operations[i - 1]);
      if (good.operations[i + 1].kind == Kind::kRelease) turn(bad.operations[i + 1]);
    }
    return schedule_fault(bad, shape);
  };
  for (const auto& [a, b] : {std::pair(3, 4), std::pair(4, 5), std::pair(3, 5)}) {
    EXPECT_NE(exchanged(Kind::kForward, a, b), "") << a << b;
    EXPECT_NE(exchanged(Kind::kBackward, a, b), "") << a << b;
  }
  EXPECT_NE(exchanged(Kind::kForward, 2, 3), "");   // the final norm picks the rows
  EXPECT_NE(exchanged(Kind::kBackward, 2, 5), "");  // and takes the sum over all segments
  const auto fault = [&](const Operation& what, const Operation& before) {
    return schedule_fault(moved(good, what, before), shape);
  };
  EXPECT_NE(fault({Kind::kBackward, 3, 0}, {Kind::kForward, 5, 0}), "");
  EXPECT_NE(fault({Kind::kNorm, 4, 0}, {Kind::kBackward, 4, 1}), "");
  EXPECT_NE(fault({Kind::kUpdate, 5, 0, 2}, {Kind::kUpdate, 4, 0, 1}), "");
}

}  // namespace
}  // namespace lm
