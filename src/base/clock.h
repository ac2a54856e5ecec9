// Monotonic seconds: every duration in the program comes from here; wall-clock time appears only in output.
// And durations as text: "90s", "30min", "8h", "2d".
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace lm {

// nullopt if it is not a whole number of one of the four units, or exceeds a century.
std::optional<int64_t> parse_seconds(std::string_view text);
// In the largest unit that divides it; parse_seconds reads it back.
std::string seconds_text(int64_t seconds);

// Since 1970, in milliseconds' steps: for readers of what the program writes, not for durations.
inline double unix_seconds() {
  using std::chrono::milliseconds;
  const auto since = std::chrono::system_clock::now().time_since_epoch();
  return static_cast<double>(std::chrono::duration_cast<milliseconds>(since).count()) / 1e3;
}

inline int64_t steady_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline double monotonic_seconds() {
  return static_cast<double>(steady_ns()) / 1e9;
}

}  // namespace lm
