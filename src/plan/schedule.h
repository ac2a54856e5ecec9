// The step as a value: a list of operations that the executor walks, the predictor times and tests inspect. The
// order is known beforehand because the model's code is ours. Blocks: 0 embedding, 1 .. L transformer blocks,
// L + 1 final norm and head.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/config.h"

namespace lm {

enum class OperationKind : uint8_t {
  kAcquire,    // the block's weights are borrowed
  kForward,    // of a micro-batch through a block (the head's forward is part of kHead)
  kRelease,
  kHead,       // loss forward and backward in chunks
  kRecompute,  // the block's saved activations once more from its input
  kBackward,
  kReduce,     // the block's gradient is final
  kCheck,      // loss, norm and finiteness are known: the step's one wait
  kUpdate,
};

struct Operation {
  OperationKind kind;
  int64_t block = 0;
  int64_t micro = 0;
  bool operator==(const Operation&) const = default;
};

struct Schedule {
  std::vector<Operation> operations;
};

struct ScheduleShape {
  int64_t layers = 0;
  int64_t micro_batches = 1;
  bool tied = false;
  bool recompute = false;
  Clip clip = Clip::kGlobal;
};

// With everything at home each micro-batch runs through all blocks before the next (G = 1). Under global clipping
// every update waits for the check; otherwise a block is updated as soon as its gradient is final.
Schedule make_schedule(const ScheduleShape& shape);

// Empty, or the first rule that `schedule` breaks: every forward has its backward in reverse order, micro-batches
// ascend, loans are balanced and held by every use, each block is reduced once after its last backward, updates
// follow their reduce (and the check, under global clipping) with no loan open.
std::string schedule_fault(const Schedule& schedule, const ScheduleShape& shape);

}  // namespace lm
