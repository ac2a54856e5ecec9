// The step as a value: a list of operations that the executor walks, the cost model times and tests inspect.
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

#include "schedule/step_config.h"

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
  kReduceScatter,  // every rank adds up its shard of the unit's gradient from all of them; absent with one
                   // rank
  kNorm,           // the unit's gradient is final: its part of the norm
  kCheck,          // loss, norm and finiteness are known: the step's one wait
  kUpdate,         // of a tile of the unit's state
  kGather,         // every rank has updated its shard of weights that all keep whole: all get all of them
  // Between an array's tier and a slot; inserted by transfers.h, absent while everything is in place.
  kFetch,         // the array's bytes start on their way into the slot
  kAllocateSlot,  // the slot becomes the array's, whose bytes are about to be made
  kWriteBack,     // the array's bytes, changed, start on their way back
};
const char* operation_name(OperationKind kind);
// The model's passes, each of one micro-batch (model/pass.h). The others are of a unit, or of the step.
bool computes(OperationKind kind);

struct Operation {
  OperationKind kind;
  int64_t unit = 0;   // its number, which also counts the arrays of weights and of gradients
  int64_t micro = 0;  // micro-batch
  int64_t tile = 0;   // of an update, counted in the unit's block
  // Set for transfers only.
  Pool pool = Pool::kWeights;
  int64_t array = 0;
  int64_t slot = 0;
  bool operator==(const Operation&) const = default;
};

bool is_transfer(const Operation& operation);  // one of the last three kinds

struct StepSchedule {
  std::vector<Operation> operations;
};

// Under global clipping every update waits for the check; otherwise a unit is updated as soon as its block's
// gradient is final. With updates inside backward under global clipping, the check stands between two
// backwards of the same micro-batches; what the first one needs and recomputation does not keep, a second
// forward makes again.
StepSchedule make_schedule(const StepConfig& step);

// The deferred updates alone: before evaluation, saving and the end.
StepSchedule make_flush_schedule(const StepConfig& step);

// Forward and loss alone, `micro_batches` of them.
StepSchedule make_evaluation_schedule(const StepConfig& step);

}  // namespace lm
