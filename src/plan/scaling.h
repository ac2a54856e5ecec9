// The same run on other numbers of ranks: what each of them needs, how fast they are together, what binds
// them, and how few are enough. Pure.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace lm {

struct ScalingRow {
  World world;
  bool fits = false;
  PeakBytes peak;                             // of a rank
  double step_seconds = 0, call_seconds = 0;  // of the first, what calls of all ranks take
  double tokens_per_second = 0;               // of all ranks
  double efficiency = 0;                      // against the fewest ranks that fit, per rank
  std::string binding;
};

struct Scaling {
  std::vector<ScalingRow> rows;  // by ranks: powers of two, the most, and the fewest that fit
  int fewest = 0;                // ranks that fit; 0: none of these numbers do
};

// `node`: a whole machine. Of the numbers up to `most`, those that fill machines of as many ranks, and no
// more than there are sequences in a step.
Scaling estimate_scaling(const PlanInputs& inputs, const Machine& node, const World& most);

std::string print_scaling(const Scaling& scaling, const Plan& plan);
// An object of `fewest_ranks` and `rows`.
std::string scaling_json(const Scaling& scaling);

// What the estimate has not been held against, or leaves out; for people.
std::vector<std::string> scaling_notes(const Plan& plan);

}  // namespace lm
