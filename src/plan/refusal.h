// Why a plan is refused and what would make it fit: a table of need and have, and at most three settings with
// the bytes they save. Inside src/plan.
#pragma once

#include "plan/sizes.h"

namespace lm {

// `plan` is the draft made from `in`, with fits = false.
ErrorText explain_refusal(const PlanInput& in, const Plan& plan);

}  // namespace lm
