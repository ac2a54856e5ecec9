#include "schedule/transfers.h"

#include <gtest/gtest.h>

#include <array>
#include <numeric>
#include <random>

#include "schedule/rank_clock.h"
#include "schedule/step_lists.h"
#include "schedule/timeline.h"
#include "tests/support/oracles/schedule_fault.h"
#include "tests/support/oracles/transfer_fault.h"
#include "transfer_text.h"
#include "units.h"

namespace lm {
namespace {

TEST(Transfers, LeaveAListAsItIsWhenEverythingIsInPlace) {
  const StepSchedule step = make_schedule({.units = schedule_units(3), .micro_batches = 2});
  const StepConfig shape;
  SlotState state(shape);
  EXPECT_EQ(add_transfers(step, step, shape, state).operations, step.operations);
}

TEST(Transfers, FetchFrozenWeightsAheadAndKeepWhatTheTurnNeeds) {
  const StepConfig run{.units = schedule_units(4)};
  const StepConfig shape = stream(Pool::kWeights, {0, 1, 1, 1, 1, 0}, 2, run);
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
  StepConfig run{.units = tiled_units(1, {0, 4, 0})};
  StepConfig shape = stream(Pool::kOptimizer, {1, 1, 1, 1}, 2, run);
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
  const StepConfig run{.units = schedule_units(2), .micro_batches = 2};
  const StepConfig shape = stream(Pool::kGradients, {0, 1, 1, 0}, 1, run);
  SlotState state(shape);
  const StepSchedule step = make_schedule(run);
  const std::string steady =
      "c2>0 forward0.0 forward1.0 forward2.0 backward2.0 w2>0 c1>0 backward1.0 w1>0 f2>0 backward0.0 "
      "forward0.1 forward1.1 forward2.1 backward2.1 w2>0 f1>0 backward1.1 ";
  // The update of block 1 finds its gradient; block 2's comes back once more.
  EXPECT_EQ(text(add_transfers(step, step, shape, state)),
            steady + "backward0.1 update0.0 update1.0 f2>0 update2.0 c2>0 update3.0 ");
}

TEST(Transfers, BringAChunkedHeadsMatrixTwiceAndItsSumsOnce) {
  const StepConfig run{.units = schedule_units(1, 3), .micro_batches = 2, .group = 2};
  StepConfig shape = stream(Pool::kWeights, {0, 0, 0, 1, 1, 1}, 2, run);
  const std::string begin = "forward0.0 forward0.1 forward1.0 forward1.1 forward2.0 forward2.1 ";
  StepSchedule frozen = make_schedule(run);
  std::erase_if(frozen.operations, [](const Operation& op) { return op.kind == Kind::kUpdate; });
  SlotState state(shape);
  const StepSchedule step = add_transfers(frozen, frozen, shape, state);
  EXPECT_EQ(text(step),
            "f3>0 f4>1 " + begin +
                "forward3.0 forward3.1 f5>0 forward4.0 forward4.1 f3>1 forward5.0 forward5.1 f4>0 "
                "backward3.0 backward3.1 f5>1 backward4.0 backward4.1 f3>0 backward5.0 backward5.1 f4>1 "
                "backward2.0 backward2.1 backward1.0 backward1.1 backward0.0 backward0.1 ");
  // The gradient: claimed, summed over both micro-batches, normed where it lies, and back for the update.
  shape = stream(Pool::kGradients, {0, 0, 0, 1, 1, 1}, 1, run);
  SlotState slots(shape);
  EXPECT_EQ(
      text(add_transfers(make_schedule(run), make_schedule(run), shape, slots)),
      "c3>0 " + begin +
          "forward3.0 forward3.1 forward4.0 forward4.1 forward5.0 forward5.1 "
          "backward3.0 backward3.1 w3>0 c4>0 backward4.0 backward4.1 w4>0 c5>0 backward5.0 "
          "backward5.1 w5>0 f3>0 backward2.0 backward2.1 backward1.0 backward1.1 backward0.0 backward0.1 "
          "update0.0 update1.0 update2.3 update3.0 f4>0 update4.1 f5>0 update5.2 c3>0 ");
}

// What a reduce_scatter makes of a gradient is what its tier is sent; where compute is timed, so is it.
TEST(Transfers, SendAGradientBackAfterItsReduceScatter) {
  const StepConfig run{.units = schedule_units(2), .ranks = 2};
  const StepConfig shape = stream(Pool::kGradients, {0, 1, 1, 0}, 1, run);
  SlotState state(shape);
  EXPECT_EQ(text(add_transfers(make_schedule(run), make_schedule(run), shape, state)),
            "c2>0 forward0.0 forward1.0 forward2.0 exchange3.0 backward2.0 exchange2.0 w2>0 c1>0 backward1.0 "
            "exchange1.0 backward0.0 exchange0.0 update0.0 update1.0 f2>0 update2.0 c2>0 update3.0 ");
  const auto seconds = [](const Operation& op) { return op.kind == Kind::kReduceScatter ? 1.0 : 0.0; };
  EXPECT_EQ(walk_timeline(run, {}, {}, seconds).seconds, 4);
}

// A rank's update changes its shard where it lives: nothing is fetched for it, and what the slots have of the
// unit is old.
TEST(Transfers, LeaveAShardInPlaceToItsUpdateAndFetchItBehindThat) {
  StepConfig run{.units = schedule_units(2), .ranks = 2, .sharded = true};
  run.units[1].in_shards = run.units[2].in_shards = true;
  const StepConfig shape = stream(Pool::kWeights, {0, 1, 1, 0}, 2, run);
  const StepSchedule step = make_schedule(run);
  ASSERT_EQ(schedule_fault(step, run), "");
  SlotState state(shape);
  const SlotState empty = state;
  const StepSchedule first = add_transfers(step, step, shape, state);
  EXPECT_EQ(
      text(first),
      "f1>0 f2>1 forward0.0 forward1.0 forward2.0 exchange3.0 backward2.0 exchange2.0 "
      "backward1.0 exchange1.0 backward0.0 exchange0.0 update0.0 update1.0 f1>1 update2.0 f2>0 update3.0 ");
  EXPECT_EQ(transfer_fault(first, shape, empty), "");
  const SlotState before = state;
  const StepSchedule second = add_transfers(step, step, shape, state);
  EXPECT_GT(text(second).find("f1>"), text(second).find("update1.0"));
  EXPECT_EQ(transfer_fault(second, shape, before), "");
  // With what a slot has from before the update the next step is at fault.
  StepSchedule both = first;
  std::erase_if(both.operations,
                [](const Operation& op) { return op.kind == Kind::kFetch && op.slot == 1 && op.array == 1; });
  both.operations.insert(both.operations.end(), second.operations.begin(), second.operations.end());
  EXPECT_NE(transfer_fault(both, shape, empty).find("in no slot"), std::string::npos);
}

TEST(Transfers, KeepTheEmbeddingsGradientForItsRows) {
  const StepConfig run{.units = schedule_units(1), .micro_batches = 2};
  const StepSchedule step = make_schedule(run);
  const StepConfig shape = stream(Pool::kGradients, {1, 0, 0}, 1, run);
  int rows = 0;
  for (const ArrayUse& use : array_uses(step, Pool::kGradients, shape)) {
    if (step.operations[use.begin].kind != Kind::kAddRows) continue;
    EXPECT_TRUE(use.needs && use.changes && !use.dies);
    ++rows;
  }
  EXPECT_EQ(rows, 1);
}

TEST(Transfers, SendASegmentBackBetweenItsUpdateAndItsLastUse) {
  const StepConfig run{.units = tiled_units(1, {0, 0, 4}, {2, 1, 1}), .pending = true};
  StepConfig shape = stream(Pool::kWeights, {0, 0, 0, 1, 1}, 1, run);
  SlotState state(shape);
  const StepSchedule step = make_schedule(run);
  add_transfers(step, step, shape, state);
  // Both tiles of a segment and its forward find it in the slot; its new bytes go back once.
  EXPECT_EQ(text(add_transfers(step, step, shape, state)),
            "forward0.0 forward1.0 update2.3 forward2.0 update3.0 update3.1 w3>0 forward3.0 f4>0 update4.2 "
            "w4>0 forward4.0 f3>0 backward3.0 f4>0 backward4.0 f3>0 backward2.0 backward1.0 backward0.0 "
            "update0.0 update1.0 ");
}

// The planner and its check read the same uses, so these are looked at themselves.
TEST(Transfers, KeepAGradientUntilItsLastTile) {
  const StepConfig run{.units = tiled_units(1, {0, 3, 4}, {2, 1, 1}), .pending = true};
  const StepConfig shape = stream(Pool::kGradients, {0, 1, 0, 1, 1}, 1, run);
  const StepSchedule step = make_schedule(run);
  int last = 0;
  for (const ArrayUse& use : array_uses(step, Pool::kGradients, shape)) {
    const Operation& op = step.operations[use.begin];
    EXPECT_EQ(use.dies, op.kind == Kind::kUpdate && op.tile + 1 == run.unit(op.unit).end_tile)
        << operation_name(op.kind) << op.unit << "." << op.tile;
    last += use.dies;
  }
  EXPECT_EQ(last, 3);
}

StepConfig random_case(std::mt19937& random) {
  const auto draw = [&](int from, int to) { return std::uniform_int_distribution<int>(from, to)(random); };
  const int64_t layers = draw(1, 5);
  StepConfig c{.units = {},
               .micro_batches = draw(1, 5),
               .tied = draw(0, 1) == 1,
               .recompute =
                   std::array<RecomputeChoice, 4>{
                       Recompute::kNone, Recompute::kAttention, Recompute::kBlock,
                       RecomputeChoice(Recompute::kBlock, 2)}[static_cast<size_t>(draw(0, 3))],
               .clip = static_cast<Clip>(draw(0, 2)),
               .group = draw(1, 3)};
  const auto blocks = static_cast<size_t>(layers + 2);
  c.in_backward = draw(0, 2) == 0;
  if (c.in_backward) c.group = 5;
  // At least a tile in each segment, wherever it is.
  std::vector<int64_t> cut;
  if (!c.tied && draw(0, 1) == 1) {
    for (int i = draw(1, 4); i >= 0; --i) cut.push_back(draw(1, 2));
  }
  const auto inner = [&] {
    std::vector<char> through_slots(blocks + std::max(cut.size(), size_t{1}) - 1, 0);
    for (size_t b = 1; b < through_slots.size(); ++b)
      through_slots[b] = static_cast<char>(b + 1 != blocks && draw(0, 2) > 0);
    return through_slots;
  };
  if (draw(0, 1) == 1) c.pool(Pool::kWeights) = {inner(), draw(1, 4)};
  if (draw(0, 1) == 1 && !c.in_backward) c.pool(Pool::kGradients) = {inner(), draw(1, 4)};
  if (draw(0, 1) == 1) {
    c.pool(Pool::kActivations) = {std::vector<char>(static_cast<size_t>((layers + 1) * c.group), 1),
                                  draw(2, 5)};
  }
  c.first_tile.push_back(0);
  PoolShape& optimizer = c.pool(Pool::kOptimizer);
  optimizer.slots = draw(0, 4);
  std::vector<int64_t> off_device;  // tiles of each block
  for (size_t b = 0; b < blocks; ++b) {
    int64_t tiles = optimizer.slots > 0 ? draw(0, 3) : 0;
    bool off = tiles > 0;
    if (b + 1 == blocks && !cut.empty()) {
      tiles = std::accumulate(cut.begin(), cut.end(), int64_t{0});
      off = optimizer.slots > 0 && draw(0, 1) == 1;
    }
    for (int64_t t = 0; t < tiles; ++t)
      optimizer.through_slots.push_back(static_cast<char>(off && (t + 1 == tiles || draw(0, 1) == 1)));
    off_device.push_back(off ? tiles : 0);
    c.first_tile.push_back(c.first_tile.back() + tiles);
  }
  c.units = tiled_units(layers, off_device, cut);
  if (draw(0, 1) == 1) {
    c.ranks = 2, c.sharded = true;
    for (size_t u = 0; u < c.units.size(); ++u)
      c.units[u].in_shards = c.pool(Pool::kWeights).holds(static_cast<int64_t>(u));
    // Of those that pass through slots, some shards are off the device.
    for (const Pool whole : {Pool::kWeights, Pool::kGradients}) {
      PoolShape shards = c.pool(whole);
      for (char& through_slots : shards.through_slots)
        through_slots = static_cast<char>(through_slots != 0 && draw(0, 3) > 0);
      shards.slots = draw(0, 1) * draw(2, 4);  // one for what is updated, one for what is gathered
      if (shards.slots > 0 && c.pool(whole).slots > 0) c.pool(*shards_of(whole)) = shards;
    }
  }
  return c;
}

TEST(Transfers, KeepEveryRuleOverManyStepsOfRandomRuns) {
  std::mt19937 random(20);
  for (int i = 0; i < 2000; ++i) {
    StepConfig c = random_case(random);
    SlotState state(c);
    for (int step = 0; step < 4; ++step) {
      c.pending = step > 0 && c.defers();
      // A step may differ in length from what was expected.
      StepConfig expected = c;
      expected.pending = c.defers();
      StepConfig now = c;
      if (step == 2) now.micro_batches = 1 + (c.micro_batches + i) % 5;
      const StepSchedule list = make_schedule(now);
      ASSERT_EQ(schedule_fault(list, now), "") << "case " << i << " step " << step;
      const SlotState before = state;
      const StepSchedule moved = add_transfers(list, make_schedule(expected), c, state);
      ASSERT_EQ(transfer_fault(moved, c, before), "") << "case " << i << " step " << step << text(moved);
    }
    c.pending = c.defers();
    const SlotState before = state;
    const StepSchedule flush = add_transfers(make_flush_schedule(c), {}, c, state);
    ASSERT_EQ(transfer_fault(flush, c, before), "") << "case " << i;
  }
}

// What is kept of a list is what would be made anew.
TEST(StepLists, AreTheSameMadeOrKept) {
  std::mt19937 random(3);
  for (int i = 0; i < 500; ++i) {
    const StepConfig c = random_case(random);
    StepLists lists(c);
    SlotState slots(c);
    StepConfig now = c;
    for (int step = 0; step < 12; ++step) {
      if (step % 5 == 4) {
        ASSERT_EQ(lists.flush().operations, add_transfers(make_flush_schedule(now), {}, c, slots).operations);
        ASSERT_FALSE(lists.pending());
        lists.take_slots();
        slots = SlotState(c);
        now.pending = false;
      }
      now.micro_batches = step == 7 ? 1 + (c.micro_batches + i) % 5 : c.micro_batches;
      const StepSchedule list = make_schedule(now);
      now.pending = c.defers();
      ASSERT_EQ(lists.step(now.micro_batches).operations,
                add_transfers(list, make_schedule(now), c, slots).operations)
          << "case " << i << " step " << step;
      ASSERT_EQ(lists.pending(), now.pending);
    }
    StepConfig weights = c;
    weights.pools = {};
    weights.pool(Pool::kWeights) = c.pool(Pool::kWeights);
    weights.pool(Pool::kWeightShards) = c.pool(Pool::kWeightShards);
    weights.micro_batches = 1;
    SlotState empty(weights);
    EXPECT_EQ(lists.evaluation().list.operations,
              add_transfers(make_evaluation_schedule(weights), {}, weights, empty).operations);
    EXPECT_EQ(lists.evaluation().slots, empty);
  }
  StepLists lists({.units = schedule_units(3), .micro_batches = 2});
  EXPECT_EQ(&lists.step(2), &lists.step(2));
}

// Slots hide for some steps what a disk falls behind by, and no longer.
TEST(Timeline, OfAStepIsNoShorterThanItsDiskNeeds) {
  constexpr int64_t kLayers = 10, kTiles = 4;
  std::vector<int64_t> tiles(kLayers + 2, kTiles);
  tiles.front() = tiles.back() = 0;
  const StepConfig resident{.units = tiled_units(kLayers, tiles)};
  StepConfig run = stream(Pool::kOptimizer, std::vector<char>(kLayers * kTiles, 1), 30, resident);
  run.first_tile.push_back(0);
  for (const int64_t count : tiles) run.first_tile.push_back(run.first_tile.back() + count);
  TimelineShape shape;
  shape.arrays[static_cast<size_t>(Pool::kOptimizer)].assign(kLayers * kTiles, {1, true, false});
  const auto compute = [](const Operation& op) {
    return op.kind == Kind::kForward || op.kind == Kind::kBackward ? 1.0 : 0.0;
  };
  const double computed = walk_timeline(resident, {}, {}, compute).seconds;
  const LinkRates rates{.disk_read = 1e9, .disk_write = kLayers * kTiles / (1.1 * computed)};
  const Timeline timeline = walk_timeline(run, shape, rates, compute);
  EXPECT_EQ(timeline.disk_written_bytes, kLayers * kTiles);
  EXPECT_NEAR(timeline.seconds, 1.1 * computed, 1e-3 * computed);
}

// A second of each way, of a disk that takes turns: both end after two, and what begins later waits for less.
TEST(DiskClock, SlowsBothWaysWhileBothAreBusy) {
  const auto ends = [](double write_begins, double share) {
    DiskClock disk;
    DiskClock::pass(disk.write, disk.read, write_begins, 1, share);
    DiskClock::pass(disk.read, disk.write, 0, 1, share);
    return std::pair(disk.read.until, disk.write.until);
  };
  EXPECT_EQ(ends(0, 1), std::pair(1.0, 1.0));
  EXPECT_EQ(ends(0, 0.5), std::pair(2.0, 2.0));
  EXPECT_EQ(ends(0.5, 0.5), std::pair(1.5, 2.0));
  EXPECT_EQ(ends(1, 0.5), std::pair(1.0, 2.0));
  EXPECT_EQ(ends(7, 0.5), std::pair(1.0, 8.0));
}

// Whoever comes when: the disk is never busy for longer than one way after the other, nor for less than the
// longer one, and where nothing else is to be done it is never idle.
TEST(DiskClock, DoesTheWorkOfBothWays) {
  std::mt19937 random(11);
  const auto draw = [&] { return 1e-3 * static_cast<double>(random() % 1000); };
  for (int round = 0; round < 200; ++round) {
    DiskClock disk;
    double read = 0, written = 0;
    for (int i = 0; i < 50; ++i) {
      const double seconds = draw();
      const bool reads = random() % 2 == 0;
      (reads ? read : written) += seconds;
      reads ? DiskClock::pass(disk.read, disk.write, 0, seconds, 0.5)
            : DiskClock::pass(disk.write, disk.read, 0, seconds, 0.5);
    }
    EXPECT_NEAR(std::max(disk.read.until, disk.write.until), read + written, 1e-9);
    EXPECT_NEAR(std::min(disk.read.until, disk.write.until), 2 * std::min(read, written), 1e-9);
  }
}

// All that a step moves crosses a disk that takes turns one after the other.
TEST(Timeline, OfADiskThatTakesTurnsIsTheSumOfBothWays) {
  constexpr int64_t kLayers = 10, kTiles = 4;
  std::vector<int64_t> tiles(kLayers + 2, kTiles);
  tiles.front() = tiles.back() = 0;
  const StepConfig resident{.units = tiled_units(kLayers, tiles)};
  StepConfig run = stream(Pool::kOptimizer, std::vector<char>(kLayers * kTiles, 1), 30, resident);
  run.first_tile.push_back(0);
  for (const int64_t count : tiles) run.first_tile.push_back(run.first_tile.back() + count);
  TimelineShape shape;
  shape.arrays[static_cast<size_t>(Pool::kOptimizer)].assign(kLayers * kTiles, {1, true, false});
  const auto seconds = [&](double share) {
    const LinkRates rates{.disk_read = 1, .disk_write = 1, .disk_share = share};
    return walk_timeline(run, shape, rates, [](const Operation&) { return 1e-6; }).seconds;
  };
  EXPECT_NEAR(seconds(0.5), 2 * kLayers * kTiles, 0.02 * kLayers * kTiles);
  EXPECT_LT(seconds(1), 0.8 * seconds(0.5));
}

TEST(Transfers, AreFoundFaultyWhenOneIsMissingOrLate) {
  std::mt19937 random(7);
  int mutants = 0, caught = 0;
  for (int i = 0; i < 300; ++i) {
    const StepConfig c = random_case(random);
    SlotState state(c);
    const SlotState before = state;
    const StepSchedule list = make_schedule(c);
    const StepSchedule good = add_transfers(list, list, c, state);
    for (size_t k = 0; k < good.operations.size(); ++k) {
      const Kind kind = good.operations[k].kind;
      if (kind != Kind::kFetch && kind != Kind::kAllocateSlot) continue;
      StepSchedule bad = good;
      bad.operations.erase(bad.operations.begin() + static_cast<std::ptrdiff_t>(k));
      // What is fetched for the next step is missed only there.
      const StepSchedule rest{
          {good.operations.begin() + static_cast<std::ptrdiff_t>(k) + 1, good.operations.end()}};
      bool used = false;
      for (const ArrayUse& use : array_uses(rest, good.operations[k].pool, c))
        used = used || (use.array == good.operations[k].array && !use.in_place);
      if (!used) continue;
      ++mutants;
      caught += !transfer_fault(bad, c, before).empty();
    }
  }
  EXPECT_GT(mutants, 500);
  EXPECT_EQ(caught, mutants);
}

}  // namespace
}  // namespace lm
