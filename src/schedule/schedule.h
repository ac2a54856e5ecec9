// The step as a value: a list of operations that the executor walks, the predictor times and tests inspect.
// The order is known beforehand because the model's code is ours. Operations are on units
// (spec/block_layout.h): the embedding, the transformer blocks, the head.
//
// A head that is cut comes in vocabulary segments, each of them a step of its own for all micro-batches of a
// group: forward of the final norm (rows are picked and normed), forward of each segment (its part of the
// softmax), backward of each segment, backward of the final norm. So its matrix crosses a link twice, and
// never has to be there as a whole.
#pragma once

#include <cstdint>
#include <vector>

#include "config/config.h"
#include "spec/block_layout.h"

namespace lm {

enum class OperationKind : uint8_t {
  kAcquire,  // the unit's weights are borrowed
  kForward,  // of a micro-batch through a unit (a whole head's forward is part of kHead)
  kRelease,
  kHead,       // loss in chunks of rows; in a step also its backward
  kRecompute,  // a transformer block's saved activations once more from its input
  kBackward,
  kTableGradient,  // the head's part of a tied table's gradient, where that is made last
  kAddRows,        // the rows that the embedding's backward has summed join the block's gradient
  kExchange,  // every rank adds up its shard of the unit's gradient from all of them; absent with one rank
  kNorm,      // the unit's gradient is final: its part of the norm
  kCheck,     // loss, norm and finiteness are known: the step's one wait
  kUpdate,    // of a tile of the unit's state
  kGather,    // every rank has updated its shard of weights that all keep whole: all get all of them
  // Between an array's home and a slot; inserted by transfers.h, absent while everything is at home.
  kFetch,      // the array's bytes start on their way into the slot
  kClaim,      // the slot becomes the array's, whose bytes are about to be made
  kWriteBack,  // the array's bytes, changed, start on their way home
};
const char* operation_name(OperationKind kind);
// The model's passes, each of one micro-batch (model/pass.h). The others are of a unit, or of the step.
bool computes(OperationKind kind);

// What moves as one array: a unit's weights, a unit's gradient, a tile of optimizer state, a micro-batch's
// input of a block.
enum class Pool : uint8_t { kWeights, kGradients, kOptimizer, kActivations };
inline constexpr int kPools = 4;
const char* pool_name(Pool pool);

struct Operation {
  OperationKind kind;
  int64_t unit = 0;   // its number, which also counts the arrays of weights and of gradients
  int64_t micro = 0;  // micro-batch
  int64_t tile = 0;   // of an update, counted in the unit's block
  // Of transfers alone.
  Pool pool = Pool::kWeights;
  int64_t array = 0;
  int64_t slot = 0;
  bool operator==(const Operation&) const = default;
};

bool is_transfer(const Operation& operation);  // one of the last three kinds

struct StepSchedule {
  std::vector<Operation> operations;
};

// A unit as the schedule sees it.
struct ScheduleUnit {
  int64_t block = 0;
  UnitRole role = UnitRole::kBody;
  // Its updates: tiles [first_tile, end_tile) of its block. State on the device is one tile.
  int64_t first_tile = 0, end_tile = 1;
  // Whether any of the block's state is off the device. Under global clipping the update of such a unit is
  // deferred: it runs under the next forward, before the unit's own.
  bool off_device = false;
  // Each rank has its shard of the weights alone. An update changes that where it lives, and whoever uses the
  // unit gathers it.
  bool in_shards = false;

  int64_t tiles() const { return end_tile - first_tile; }
  bool operator==(const ScheduleUnit&) const = default;
};
// The units of a model (list_units says which), all state on the device.
std::vector<ScheduleUnit> schedule_units(int64_t layers, int64_t segments = 0);

struct ScheduleShape {
  std::vector<ScheduleUnit> units;
  int64_t micro_batches = 1;
  bool tied = false;
  bool recompute = false;
  Clip clip = Clip::kGlobal;
  // Micro-batches that run through a unit before the next unit (G). 1 while weights are resident; off
  // the device each of their bytes crosses its link once per pass and group.
  int64_t group = 1;
  bool pending = false;  // the step before has left its deferred updates to this one
  int ranks = 1;         // that share the step
  bool sharded = false;  // a rank updates its shard of a unit alone, and weights are gathered
  // A block's gradient ends with its update, right after its backward: all micro-batches are one group.
  bool in_backward = false;
  // The gradient of a tied table is made when every block's has ended, in the memory of these and of the
  // activations: the head leaves it out, and its logits are computed once more. Only with updates inside
  // backward, and one backward of a step.
  bool table_last = false;

  const ScheduleUnit& unit(int64_t u) const { return units[static_cast<size_t>(u)]; }
  // All gradients are there when the step is checked, and updates come then.
  bool updates_at_end() const { return clip == Clip::kGlobal && !in_backward; }
  bool deferred(int64_t u) const { return updates_at_end() && unit(u).off_device; }
  // A first backward is for the norm alone, a second one makes the gradients once more for the updates.
  bool measures() const { return clip == Clip::kGlobal && in_backward; }
  bool defers() const;  // any unit
};

// Under global clipping every update waits for the check; otherwise a unit is updated as soon as its block's
// gradient is final. With updates inside backward under global clipping, the check stands between two
// backwards of the same micro-batches; what the first one needs and recomputation does not keep, a second
// forward makes again.
StepSchedule make_schedule(const ScheduleShape& shape);

// The deferred updates alone: before evaluation, saving and the end.
StepSchedule make_flush_schedule(const ScheduleShape& shape);

// Forward and loss alone, `micro_batches` of them.
StepSchedule make_evaluation_schedule(const ScheduleShape& shape);

}  // namespace lm
