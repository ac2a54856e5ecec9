// Dropout's rule, shared by both launchers: which random numbers keep an element, and the factor of the kept
// ones.
#pragma once

#include <cmath>

#include "base/philox.h"

namespace lm {

// An element is kept iff the upper 24 bits of its number reach this: u = bits / 2^24 >= p, exactly.
inline uint32_t dropout_threshold(float p) {
  return static_cast<uint32_t>(std::ceil(static_cast<double>(p) * 16777216.0));
}
inline float dropout_scale(float p) {
  return static_cast<float>(1.0 / (1.0 - static_cast<double>(p)));
}

}  // namespace lm
