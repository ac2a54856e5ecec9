// What moves, and when: given a step's operations and which arrays live off the device, says into which slot
// each array is fetched, when, and what is written back. Every pool has a fixed number of slots, in which the
// array used longest ago makes room; a fetch stands where its slot becomes free, as early as the order of the
// list allows, and what will have left its slot before it is used again is written back right after its last
// change. Executor, predictor and tests walk the resulting list; it does not depend on timing. Pure values.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace lm {

struct PoolShape {
  // Per array: 1 = lives off the device and passes through slots; empty: none does. (What the CPU updates
  // where it lies, beside a GPU, is off the device and needs no slot.)
  std::vector<char> through_slots;
  int64_t slots = 0;

  bool holds(int64_t array) const {
    return static_cast<size_t>(array) < through_slots.size() &&
           through_slots[static_cast<size_t>(array)] != 0;
  }
};

// Arrays: weights and gradients by unit; optimizer by tile, the blocks' tiles one after another; activations
// (block - 1) x group + micro-batch in its group, the input of blocks 1 .. L + 1.
struct TransferShape {
  std::array<PoolShape, kPools> pools;
  std::vector<ScheduleUnit> units;  // as in ScheduleShape
  std::vector<int64_t> first_tile;  // of each block
  int64_t group = 1;
  bool frozen_weights = false;  // no update changes what the weight pool moves
  bool measures = false;        // as ScheduleShape's: block inputs are for two backwards

  const PoolShape& pool(Pool p) const { return pools[static_cast<size_t>(p)]; }
  PoolShape& pool(Pool p) { return pools[static_cast<size_t>(p)]; }
  const ScheduleUnit& unit(const Operation& op) const { return units[static_cast<size_t>(op.unit)]; }
  // The optimizer's array that an update changes.
  int64_t tile(const Operation& op) const {
    return first_tile.empty() ? 0 : first_tile[static_cast<size_t>(unit(op).block)] + op.tile;
  }
  bool any() const;
};

// What the slots hold between two lists.
struct Slot {
  int64_t array = -1;     // -1: nothing of worth
  bool changed = false;   // modified since it was last written back
  bool promised = false;  // fetched for a use that is still to come
  int64_t order = 0;      // of its last use
};
struct SlotState {
  std::array<std::vector<Slot>, kPools> pools;
  explicit SlotState(const TransferShape& shape);
};

// `step` with its transfers. `next` is what is expected to follow (may be empty): it decides what is worth
// keeping, and its first fetches may stand at the end of this list. Throws Error(70) where a pool has fewer
// slots than one operation needs.
StepSchedule add_transfers(const StepSchedule& step, const StepSchedule& next, const TransferShape& shape,
                           SlotState& state);

// Uses of arrays by one operation of a list, in order.
struct ArrayUse {
  size_t begin = 0, end = 0;  // operations, inclusive: the array stays in its slot between them
  int64_t array = 0;
  bool needs = true;     // the bytes must be there
  bool changes = false;  // and are others afterwards
  bool dies = false;     // nobody wants them afterwards
  bool at_home = false;  // no use of a slot: the home changes, and what a slot has of the array is old
};
std::vector<ArrayUse> array_uses(const StepSchedule& schedule, Pool pool, const TransferShape& shape);

}  // namespace lm
