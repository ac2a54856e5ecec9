// Test oracle: checks a step's list of operations against the rules of a schedule, whoever made the list.
// Pure.
#pragma once

#include <string>

#include "schedule/schedule.h"

namespace lm {

// Empty, or the first rule that `schedule` breaks:
// - A micro-batch passes the blocks in order and returns through them in reverse. Micro-batches ascend in
// every
//   unit, so that every accumulator adds in order.
// - Loans are balanced, and every use holds one.
// - Segments follow each other in order, so that softmax and dX add up as in a whole head.
// - Recomputation stands right before its backward.
// - Each unit's gradient is exchanged (with several ranks) and normed once after its last backward; the
//   embedding's with its rows.
// - Updates follow that (and the check, under global clipping) with no loan open, tile by tile.
// - Weights of which each rank has updated a shard are gathered before their next use; those in shards by
// that
//   use.
// - No operation uses an updated unit in the same step. A deferred update comes before its unit's next use.
// - With updates inside backward, a block's gradient begins after the one before it in the slot has ended. A
//   tied embedding's gradient, which the head begins, has memory of its own; made last, it also begins after
//   all activations have ended.
// Transfers are checked by transfer_fault.
std::string schedule_fault(const StepSchedule& schedule, const StepConfig& shape);
// The same for an evaluation's list.
std::string evaluation_fault(const StepSchedule& schedule, const StepConfig& shape);

}  // namespace lm
