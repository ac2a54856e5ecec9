// What a placed plan's step takes: cost_model.h for compute, the schedule's timeline where something passes
// through slots. Inside src/plan; rates never steer numerics.
#pragma once

#include <functional>
#include <vector>

#include "plan/sizes.h"

namespace lm {

// What a step's costs depend on, and the seconds that a rank computes in each of its operations; the latter
// borrows `plan` and `costs`.
StepShape step_shape(const PlanInput& in, const SizedPlan& plan);
std::function<double(const Operation&)> compute_seconds(const PlanInput& in, const SizedPlan& plan,
                                                        const StepCosts& costs);
// The same with the calls of all ranks that belong to it; borrows `in`, too.
std::function<double(const Operation&)> operation_seconds(const PlanInput& in, const SizedPlan& plan,
                                                          const StepCosts& costs);

// What a step moves: of frozen experts that are fetched by routing, those that its tokens are expected to
// meet.
TimelineShape expected_timeline(const PlanInput& in, const SizedPlan& plan);

// Micro-batches of a rank's step: fewer than the numerics' where an epoch has fewer.
int64_t step_micro_batches(const PlanInput& in, const NumericsPlan& numerics);
PlanCost estimate(const PlanInput& in, const SizedPlan& plan);
// What it assumes, and what of a step surprises.
std::vector<Choice> explain_estimate(const PlanInput& in, const Plan& plan);

// Gives a sized plan its cost, and the micro-batches that this is for; explained among the choices.
void estimate_plan(const PlanInput& in, Plan& plan);

// Of all ranks; 0 where nothing was estimated.
double tokens_per_second(const PlanCost& cost);

}  // namespace lm
