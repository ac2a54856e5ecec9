// What moves, and when: given a step's operations and which arrays live off the device, says into which slot
// each array is fetched, when, and what is written back. Every pool has a fixed number of slots, in which the
// array used longest ago makes room; a fetch stands where its slot becomes free, as early as the order of the
// list allows, and what will have left its slot before it is used again is written back right after its last
// change. Executor, predictor and tests walk the resulting list; it does not depend on timing. Pure values.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "schedule/schedule.h"

namespace lm {

struct PoolShape {
  std::vector<char> streamed;  // per array: 1 = lives off the device; empty: none does
  int64_t slots = 0;

  bool holds(int64_t array) const {
    return static_cast<size_t>(array) < streamed.size() && streamed[static_cast<size_t>(array)] != 0;
  }
};

// Arrays: weights and gradients by unit (block, or segment of a cut head); optimizer by tile, the blocks'
// tiles one after another; activations (block - 1) x group + micro-batch in its group, the input of blocks 1
// .. L + 1.
struct TransferShape {
  std::array<PoolShape, kPools> pools;
  std::vector<int64_t> first_tile;     // of each block
  std::vector<int64_t> tiles;          // operations that each block's update is cut into; 0 or no entry: one
  std::vector<int64_t> segment_tiles;  // as in ScheduleShape
  int64_t layers = 0;
  int64_t group = 1;
  bool frozen_weights = false;  // no update changes what the weight pool moves

  const PoolShape& pool(Pool p) const { return pools[static_cast<size_t>(p)]; }
  PoolShape& pool(Pool p) { return pools[static_cast<size_t>(p)]; }
  bool any() const;
};

// What the slots hold between two lists.
struct Slot {
  int64_t array = -1;     // -1: nothing of worth
  bool changed = false;   // its home does not know yet
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

// Empty, or the first breach: every use finds its array in a slot, with the bytes of its last change; nothing
// changed is dropped; a slot is taken over only after its last use. `before` is the state that add_transfers
// was given.
std::string transfer_fault(const StepSchedule& schedule, const TransferShape& shape, SlotState before);

// Uses of arrays by one operation of a list, in order.
struct ArrayUse {
  size_t begin = 0, end = 0;  // operations, inclusive: the array stays in its slot between them
  int64_t array = 0;
  bool needs = true;     // the bytes must be there
  bool changes = false;  // and are others afterwards
  bool dies = false;     // nobody wants them afterwards
};
std::vector<ArrayUse> array_uses(const StepSchedule& schedule, Pool pool, const TransferShape& shape);

}  // namespace lm
