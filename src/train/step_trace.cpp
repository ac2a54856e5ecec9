// The step's operations in a trace: on the host when they were executed or enqueued for the GPU, and by the
// GPU's clock when it executed them.
#include <fmt/format.h>
#include <algorithm>

#include "base/device_clock.h"
#include "train/step.h"

namespace lm {
namespace {

// Whether the operation computes, rather than only acquires or releases.
bool works(OperationKind kind) {
  switch (kind) {
    case OperationKind::kAcquire:
    case OperationKind::kRelease:
    case OperationKind::kFetch:
    case OperationKind::kAllocateSlot:
    case OperationKind::kWriteBack:
      return false;
    default:
      return true;
  }
}

}  // namespace

void TrainStep::execute(const Operation& operation) {
  if (trace_ == nullptr || !trace_->recording()) return carry_out(operation);
  const double waited = off_device_.wait_seconds();
  const int64_t start = arrived_ns_ = steady_ns();
  DeviceClock* const clock = works(operation.kind) ? off_device_.clock() : nullptr;
  const int64_t span = clock == nullptr ? 0
                                        : clock->begin(DeviceClock::Kind::kCompute, context_.stream, 0,
                                                       [&] { return name(operation); });
  carry_out(operation);
  if (clock != nullptr) clock->end(span, context_.stream);
  const int64_t end = steady_ns();
  const int64_t wait_end =
      std::min(end, start + static_cast<int64_t>((off_device_.wait_seconds() - waited) * 1e9));
  constexpr int64_t kShownWait = 1000;  // ns; a shorter one is only the query
  if (wait_end - start >= kShownWait) trace_->add(TraceRow::kCompute, "wait", start, wait_end);
  if (works(operation.kind) || operation.kind == OperationKind::kWriteBack)
    trace_->add(TraceRow::kCompute, name(operation), std::max(arrived_ns_, wait_end), end);
}

std::string TrainStep::name(const Operation& operation) const {
  const std::string kind = operation_name(operation.kind);
  if (operation.kind == OperationKind::kCheck) return kind;
  if (is_transfer(operation))
    return fmt::format("{} {} {}", kind, pool_name(operation.pool), operation.array);
  const std::string text = kind + " " + layout_.name(unit(operation));
  if (operation.kind == OperationKind::kAddRows || operation.kind == OperationKind::kNorm) return text;
  if (operation.kind == OperationKind::kUpdate) return fmt::format("{}, tile {}", text, operation.tile);
  return fmt::format("{}, micro-batch {}", text, operation.micro);
}

}  // namespace lm
