// Monotonic seconds: every duration in the program comes from here; wall-clock time appears only in text.
#pragma once

#include <chrono>

namespace lm {

inline double monotonic_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace lm
