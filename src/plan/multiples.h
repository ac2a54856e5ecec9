// A note on sizes that a GPU's matrix instructions are slower for. Inside src/plan; pure.
#pragma once

#include "plan/sizes.h"

namespace lm {

// Which widths of the model, and which length of a micro-batch, are no multiples of 8 (on compute capability
// 8.0, an A100: of 64), and what padding them would take and could gain. Of training in 16 bits on a GPU.
std::vector<Choice> note_multiples(const PlanInput& in, const NumericsPlan& numerics);

}  // namespace lm
