// How long a step's products take by the nominal rates of the named card, for choices that results depend on:
// those must not follow from what was measured on a machine. Ratios count, not seconds. Pure.
#pragma once

#include "plan/sizes.h"

namespace lm {

// Time of a step's matrix products in micro-batches of so many tokens, on a GPU; `recomputes`: every block's
// forward pass twice.
double nominal_product_seconds(const PlanInput& in, int64_t micro_tokens, bool recomputes);

}  // namespace lm
