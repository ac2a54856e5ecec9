// What would change a step: a second network adapter, one more disk, twice the memory of GPUs or of machines.
// Each is the same configuration, planned once more for a machine that has it. And what an estimate takes for
// granted. For people and programs that choose machines. Pure.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace lm {

struct Upgrade {
  std::string change;  // "a second network adapter"
  bool fits = false;
  double step_seconds = 0;
  double tokens_per_second = 0;
  double speedup = 0;  // of the plan's tokens per second; 0 where the plan itself does not fit
  std::string binding;
};

// Of those that the plan's machine could have: no adapter for one machine, no disk where none is used.
// `share`: a rank's, as the plan was made for.
std::vector<Upgrade> estimate_upgrades(const PlanInputs& inputs, const Machine& share, const Plan& plan);

// What binds, and the rows; and an array.
std::string print_upgrades(const Plan& plan, const std::vector<Upgrade>& upgrades);
std::string upgrades_json(const std::vector<Upgrade>& upgrades);

// The rates and lengths that the estimate has used, and which of them nobody has measured; a sentence each.
std::vector<std::string> plan_assumptions(const PlanInputs& inputs, const Machine& share, const Plan& plan);

}  // namespace lm
