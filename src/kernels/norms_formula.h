// The order in which the squares of a granule are added, shared by both launchers.
#pragma once

#include "base/host_device.h"

namespace lm {

inline constexpr int kGranuleElements = 4096;
inline constexpr int kNormLanes = 64;

// The tree (l, l + 32), (l, l + 16), ... (0, 1). A NaN sum has fixed bits.
LM_HOST_DEVICE double add_norm_lanes(double (&lane)[kNormLanes]) {
  for (int step = kNormLanes / 2; step > 0; step /= 2) {
    for (int l = 0; l < step; ++l) lane[l] += lane[l + step];
  }
  if (lane[0] == lane[0]) return lane[0];
  const uint64_t bits = 0x7FF8000000000000u;
  double nan;
  memcpy(&nan, &bits, sizeof nan);
  return nan;
}

// Normalise's divisor, for the sum of all squares.
LM_HOST_DEVICE float norm_of(double squares, float least) {
  const float norm = round_as<Bf16>(root(static_cast<float>(squares)));
  const float clamp = round_as<Bf16>(least);
  return norm < clamp ? clamp : norm;
}

}  // namespace lm
