// What a placed plan's step takes: predict.h for compute, the schedule's timeline where something passes
// through slots. Inside src/plan; rates never steer numerics.
#pragma once

#include "plan/sizes.h"

namespace lm {

// Fills schedule, prediction, timeline, links, binding and the seconds from numerics and placement.
void forecast(const PlanInput& in, Plan& plan);

}  // namespace lm
