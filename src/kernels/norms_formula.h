// The order in which the squares of a granule are added, and what is made of such sums in fp64, shared by
// both launchers.
#pragma once

#include "base/host_device.h"

namespace lm {

inline constexpr int kGranuleElements = 4096;
inline constexpr int kNormLanes = 64;

// As the fp32 forms (base/host_device.h).
LM_HOST_DEVICE double root(double a) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(a);
#else
  return __builtin_sqrt(a);
#endif
}
LM_HOST_DEVICE double one_nan(double a) {
  if (a == a) return a;
  const uint64_t bits = 0x7FF8000000000000u;
  memcpy(&a, &bits, sizeof a);
  return a;
}

// The tree (l, l + 32), (l, l + 16), ... (0, 1).
LM_HOST_DEVICE double add_norm_lanes(double (&lane)[kNormLanes]) {
  for (int step = kNormLanes / 2; step > 0; step /= 2) {
    for (int l = 0; l < step; ++l) lane[l] += lane[l + step];
  }
  return one_nan(lane[0]);
}

// Normalise's divisor, for the sum of all squares.
LM_HOST_DEVICE float norm_of(double squares, float least) {
  const float norm = round_as<Bf16>(root(static_cast<float>(squares)));
  const float clamp = round_as<Bf16>(least);
  return norm < clamp ? clamp : norm;
}

}  // namespace lm
