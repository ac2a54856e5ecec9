// What a placed plan's step takes: cost_model.h for compute, the schedule's timeline where something passes
// through slots. Inside src/plan; rates never steer numerics.
#pragma once

#include <functional>

#include "plan/sizes.h"

namespace lm {

// What a step's costs depend on, and the seconds that a rank computes in each of its operations; the latter
// borrows `plan` and `costs`.
StepShape step_shape(const PlanInput& in, const Plan& plan);
std::function<double(const Operation&)> compute_seconds(const PlanInput& in, const Plan& plan,
                                                        const StepCosts& costs);
// The same with the calls of all ranks that belong to it; borrows `in`, too.
std::function<double(const Operation&)> operation_seconds(const PlanInput& in, const Plan& plan,
                                                          const StepCosts& costs);

// Sets PlanCost of a sized plan, and the micro-batches of its step where an epoch has fewer.
void estimate_plan(const PlanInput& in, Plan& plan);

// Of all ranks; 0 where nothing was estimated.
double tokens_per_second(const Plan& plan);

}  // namespace lm
