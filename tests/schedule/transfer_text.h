// A list with its transfers as a line of text, and a pool that passes through slots.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "schedule/transfers.h"

namespace lm {

using Kind = OperationKind;

inline std::string text(const StepSchedule& schedule) {
  std::string out;
  for (const Operation& op : schedule.operations) {
    if (op.kind == Kind::kFetch || op.kind == Kind::kAllocateSlot || op.kind == Kind::kWriteBack) {
      out += std::string(1, "fcw"[static_cast<int>(op.kind) - static_cast<int>(Kind::kFetch)]) +
             std::to_string(op.array) + ">" + std::to_string(op.slot) + " ";
    } else if (op.kind == Kind::kForward || op.kind == Kind::kBackward || op.kind == Kind::kReduceScatter ||
               op.kind == Kind::kUpdate) {
      out += std::string(operation_name(op.kind)) + std::to_string(op.unit) + "." +
             std::to_string(op.kind == Kind::kUpdate ? op.tile : op.micro) + " ";
    }
  }
  return out;
}

inline StepConfig stream(Pool pool, std::vector<char> arrays, int64_t slots, const StepConfig& run) {
  StepConfig shape = run;
  shape.pool(pool) = {std::move(arrays), slots};
  return shape;
}

}  // namespace lm
