// Activations that live off the device: what a block's backward pass needs of its forward pass, as one array
// of each block and micro-batch of a group. Pure.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/sizes.h"

namespace lm {

// Bytes of each array of the pool of activations (StepConfig::input_array), for a plan whose group and level
// of recomputation are chosen: a block's input, and behind it what the level keeps.
std::vector<int64_t> activation_arrays(const PlanInput& in, const PlacedPlan& plan);

}  // namespace lm
