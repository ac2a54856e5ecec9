// A step as the plan sees it, for people: what is busy when. Pure; made for a run that begins, and for no
// other of the many plans that are drafted.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace lm {

struct StepSpan {
  double start = 0, end = 0;  // seconds from the step's begin
  std::string name;           // "forward block 0"; of joined ones "forward block 0 ... forward block 3"
  std::string kind;           // as plan.json's phases are called; of a transfer its pool
};
struct StepLane {
  std::string name;  // "compute", "disk read"
  std::vector<StepSpan> spans;
};

// Neighbours of a lane are joined where all lanes together would have more.
inline constexpr size_t kMostSpans = 300;

// A list that is longer is not walked for a picture.
inline constexpr size_t kMostOperations = 20000;

// The lanes in which anything happens; none of a list with more than kMostOperations. `machine`: the share of
// one that the plan was made for.
std::vector<StepLane> step_lanes(const PlanInputs& inputs, const Machine& machine, const Plan& plan);

// The plan's object with them: "timeline": [{"lane": name, "spans": [[start, end, name, kind], ...]}, ...].
std::string plan_json(const Plan& plan, const std::vector<StepLane>& lanes);

}  // namespace lm
