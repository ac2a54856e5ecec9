// What of the memory through which ranks send to one another is resident in each of them. Inside src/plan.
#pragma once

#include "plan/sizes.h"

namespace lm {

// Of the rank that has most. On one machine a rank reads what the others have written, and so has that of
// theirs resident, too.
int64_t shared_memory_bytes(const PlanInput& in, const PlacedPlan& plan);

}  // namespace lm
