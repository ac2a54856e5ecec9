// Why a plan is refused and what would make it fit: a table of need and have, and at most three settings with
// the bytes they save. Inside src/plan.
#pragma once

#include "plan/sizes.h"

namespace lm {

// `plan` is the draft made from `in`, with fits = false.
ErrorText explain_refusal(const PlanInput& in, const Plan& plan);

// The settings that save most of a home's memory, each alone, the best first: `train.recompute = "block"
// (saves 1.2 GiB), or ...`; "" where none does.
std::string memory_savers(const PlanInput& in, const Plan& plan, Home home);

}  // namespace lm
