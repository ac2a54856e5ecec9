// Plans the transfers of a step: given a step's operations and which arrays live off the device, decides into
// which slot each array is fetched, when, and what is written back. Every pool has a fixed number of slots,
// in which the array used longest ago makes room; a fetch stands where its slot becomes free, as early as the
// order of the list allows, and what will have left its slot before it is used again is written back right
// after its last change. Executor, cost model and tests walk the resulting list; it does not depend on
// timing. Pure values.
//
// Shards off the device are planned after everything else: a fetch or write-back of the whole array uses the
// shard, which then has to be in a slot of its own.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace lm {

// What the slots hold between two lists.
struct Slot {
  int64_t array = -1;     // -1: free
  bool changed = false;   // modified since it was last written back
  bool promised = false;  // prefetched, not yet used
  int64_t order = 0;      // of its last use
  bool operator==(const Slot&) const = default;
};
struct SlotState {
  std::array<std::vector<Slot>, kPools> pools;
  explicit SlotState(const StepConfig& config);
  // Slots keep their order, in numbers that say nothing else: all below those of a list to come.
  void settle();
  bool operator==(const SlotState&) const = default;
};

// `step` with its transfers. `next` is what is expected to follow (may be empty): it decides what is worth
// keeping, and its first fetches may stand at the end of this list. Throws Error(70) where a pool has fewer
// slots than one operation needs.
StepSchedule add_transfers(const StepSchedule& step, const StepSchedule& next, const StepConfig& config,
                           SlotState& state);

// Uses of arrays by one operation of a list, in order. Of pools of shards: by the list with the transfers of
// the other pools.
struct ArrayUse {
  size_t begin = 0, end = 0;  // operations, inclusive: the array stays in its slot between them
  int64_t array = 0;
  bool needs = true;      // the bytes must be there
  bool changes = false;   // and are others afterwards
  bool dies = false;      // dead afterwards: no write-back
  bool in_place = false;  // no use of a slot: the tier changes, and what a slot has of the array is old
};
std::vector<ArrayUse> array_uses(const StepSchedule& schedule, Pool pool, const StepConfig& config);

}  // namespace lm
