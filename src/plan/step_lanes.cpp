#include "plan/step_lanes.h"

#include <fmt/format.h>
#include <algorithm>
#include <array>

#include "plan/estimate.h"

namespace lm {
namespace {

const char* lane_name(size_t lane) {
  constexpr const char* kNames[] = {"compute",      "between ranks", "CPU update", "to the GPU",
                                    "from the GPU", "disk read",     "disk write"};
  static_assert(std::size(kNames) == kLanes);
  return kNames[lane];
}

class Names {
 public:
  Names(const ModelLayout& layout, const Plan& plan)
      : layout_(layout), plan_(plan), units_(layout.units(plan.placement.head_segments() > 0)) {}

  StepSpan span(const LaneSpan& of) const {
    const Operation& op = of.operation;
    return {of.start, of.end, name(op), is_transfer(op) ? pool_name(op.pool) : operation_name(op.kind)};
  }

 private:
  std::string name(const Operation& op) const {
    if (is_transfer(op)) return array_name(plan_.placement, layout_, op.pool, op.array);
    const std::string kind = operation_name(op.kind);
    if (op.kind == OperationKind::kCheck) return kind;
    const std::string text = kind + " " + layout_.name(units_[static_cast<size_t>(op.unit)]);
    if (computes(op.kind) && plan_.numerics.micro_batches > 1)
      return fmt::format("{}, micro-batch {}", text, op.micro);
    const bool tiled = op.kind == OperationKind::kUpdate && plan_.step.unit(op.unit).tiles() > 1;
    return tiled ? fmt::format("{}, tile {}", text, op.tile) : text;
  }

  const ModelLayout& layout_;
  const Plan& plan_;
  std::vector<Unit> units_;
};

// Each `count` neighbours become one; what it is called is what takes longest.
std::vector<StepSpan> joined(const std::vector<StepSpan>& spans, size_t count) {
  std::vector<StepSpan> out;
  for (size_t i = 0; i < spans.size(); i += count) {
    const auto first = spans.begin() + static_cast<ptrdiff_t>(i),
               end = spans.begin() + static_cast<ptrdiff_t>(std::min(i + count, spans.size()));
    const auto longest = std::max_element(
        first, end, [](const StepSpan& a, const StepSpan& b) { return a.end - a.start < b.end - b.start; });
    const auto last = end - 1;
    out.push_back({first->start, last->end, first == last ? first->name : first->name + " ... " + last->name,
                   longest->kind});
  }
  return out;
}

}  // namespace

std::vector<StepLane> step_lanes(const PlanInputs& inputs, const Machine& machine, const Plan& plan) {
  const StepConfig& step = plan.step;
  if (step.micro_batches * std::ssize(step.units) > int64_t{kMostOperations} ||
      make_schedule(step).operations.size() > kMostOperations)
    return {};
  const PlanInput in{inputs, machine, plan.world, PlanPurpose::kTrain};
  const StepCosts costs(step_shape(in, plan));
  std::vector<LaneSpan> all;
  walk_timeline(step, expected_timeline(in, plan), link_rates(machine, inputs.device),
                operation_seconds(in, plan, costs), &all);
  const Names names(inputs.layout, plan);
  std::array<std::vector<StepSpan>, kLanes> lanes;
  for (const LaneSpan& span : all) lanes[static_cast<size_t>(span.lane)].push_back(names.span(span));
  const auto busy = static_cast<size_t>(
      std::count_if(lanes.begin(), lanes.end(), [](const auto& lane) { return !lane.empty(); }));
  std::vector<StepLane> out;
  for (size_t lane = 0; lane < lanes.size(); ++lane) {
    if (lanes[lane].empty()) continue;
    const size_t most = kMostSpans / busy, count = (lanes[lane].size() + most - 1) / most;
    out.push_back({lane_name(lane), joined(lanes[lane], count)});
  }
  return out;
}

}  // namespace lm
