// The allowed values of a numeric setting.
#pragma once

#include <limits>

namespace lm {

// For numbers, and for each element of a list. `count` is the exact length of a list (0: any).
struct Range {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool low_open = false;  // low itself is not allowed
  bool high_open = false;
  int count = 0;
};

inline constexpr Range kFraction = {.low = 0, .high = 1, .high_open = true};
inline constexpr Range kPositive = {.low = 0, .high = 1e300, .low_open = true};

}  // namespace lm
