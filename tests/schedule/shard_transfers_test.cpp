// Shards off the device: transfers of a rank's shard around those of whole arrays, which use it.
#include "schedule/transfers.h"

#include <gtest/gtest.h>

#include "tests/support/oracles/transfer_fault.h"

namespace lm {
namespace {

using Kind = OperationKind;

StepConfig with_pool(Pool pool, std::vector<char> arrays, int64_t slots, StepConfig run) {
  run.pool(pool) = {std::move(arrays), slots};
  return run;
}

// Three blocks whose weights are in shards off the device.
StepConfig with_shards(int64_t slots) {
  StepConfig run{.units = schedule_units(3), .clip = Clip::kNone, .ranks = 2, .sharded = true};
  for (size_t u = 1; u <= 3; ++u) run.units[u].in_shards = true;
  run = with_pool(Pool::kWeights, {0, 1, 1, 1, 0}, 2, run);
  return with_pool(Pool::kWeightShards, {0, 1, 1, 1, 0}, slots, run);
}

TEST(ShardTransfers, FetchAShardForEachGatherAndWriteItBackAfterItsUpdate) {
  const StepConfig run = with_shards(1);
  const StepSchedule step = make_schedule(run);
  SlotState state(run);
  for (int i = 0; i < 3; ++i) {
    const SlotState before = state;
    const StepSchedule moved = add_transfers(step, step, run, state);
    ASSERT_EQ(transfer_fault(moved, run, before), "");
    int64_t written = 0, in_slot = before.pools[static_cast<size_t>(Pool::kWeightShards)].front().array;
    for (const Operation& op : moved.operations) {
      if (op.pool == Pool::kWeightShards) {
        if (op.kind == Kind::kWriteBack) {
          ++written;
          EXPECT_EQ(in_slot, op.array);
        } else {
          in_slot = op.array;
        }
      }
      if (op.kind == Kind::kFetch && op.pool == Pool::kWeights) {
        EXPECT_EQ(in_slot, op.array);
      }
      if (op.kind == Kind::kUpdate && run.unit(op.unit).in_shards) {
        EXPECT_EQ(in_slot, op.unit);
      }
    }
    EXPECT_EQ(written, 3);
  }
}

// Nothing moves once a slot for each has its shard.
TEST(ShardTransfers, LeaveShardsInSlotsThatAreEnough) {
  const StepConfig run = with_shards(3);
  const StepSchedule step = make_schedule(run);
  SlotState state(run);
  add_transfers(step, step, run, state);
  for (const Operation& op : add_transfers(step, step, run, state).operations)
    EXPECT_NE(op.pool, Pool::kWeightShards);
}

// A gradient in shards: what leaves its slot is written, and no longer than until the update.
TEST(ShardTransfers, DropShardsOfGradientsThatAreUsedUp) {
  StepConfig run{.units = schedule_units(4), .ranks = 2, .sharded = true};
  run = with_pool(Pool::kGradients, {0, 1, 1, 1, 1, 0}, 1, run);
  run = with_pool(Pool::kGradientShards, {0, 1, 1, 1, 1, 0}, 2, run);
  const StepSchedule step = make_schedule(run);
  SlotState state(run);
  for (int i = 0; i < 3; ++i) {
    const SlotState before = state;
    const StepSchedule moved = add_transfers(step, step, run, state);
    ASSERT_EQ(transfer_fault(moved, run, before), "");
    int64_t claimed = 0, written = 0, fetched = 0;
    for (const Operation& op : moved.operations) {
      if (op.pool != Pool::kGradientShards) continue;
      claimed += op.kind == Kind::kAllocateSlot ? 1 : 0;
      written += op.kind == Kind::kWriteBack ? 1 : 0;
      fetched += op.kind == Kind::kFetch ? 1 : 0;
    }
    // The first block's stays in the slot of whole gradients until its update, which comes first.
    if (i > 0) {  // the first list claims two for the next one
      EXPECT_EQ(claimed, 3);
    }
    EXPECT_EQ(written, fetched);
    EXPECT_GE(written, 1);
    for (const Slot& slot : state.pools[static_cast<size_t>(Pool::kGradientShards)])
      EXPECT_FALSE(slot.changed);
  }
}

}  // namespace
}  // namespace lm
