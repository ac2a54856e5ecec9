// The plan for a configuration that differs from the given one in a few keys: what advice and comparisons are
// made from. Inside src/plan.
#pragma once

#include <optional>

#include "plan/sizes.h"

namespace lm {

struct ChangedPlan {
  Plan plan;
  double weight_bits = 0;  // of a weight; of the base, where there is an adapter
  double state_bits = 0;   // of the optimizer's state for a trained weight, its master included
};

// Nothing where it cannot be made (LoRA targets that the model lacks).
std::optional<ChangedPlan> plan_changed(const PlanInput& in, const Config& config, Foretold foretold);

// Of what a changed configuration has thrown: a bug of the planner is no property of the configuration, and
// goes on.
void pass_on_bug(const Error& error);

// Some class may still be told to live on disk.
bool may_use_disk(const OffloadConfig& offload);

}  // namespace lm
