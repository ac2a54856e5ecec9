// Where state off a GPU is updated. Inside src/plan.
#pragma once

#include "plan/placement.h"

namespace lm {

// With a GPU, state off it is updated by the CPU where it lies or passes through the GPU: whichever fits, and
// makes the shorter step. Spends spare memory either way.
SizedPlan choose_update_site(const PlanInput& in, const PlacedPlan& start, const TierChoice& tier_choice,
                             const SizedPlan& placed);

}  // namespace lm
