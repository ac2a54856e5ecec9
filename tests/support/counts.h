// How much a test tries of what multiplies out: in `./dev test` a part in which each value is met, in `./dev
// test --full`, which sets LM_COUNTS=full, all of it.
#pragma once

#include <cstdlib>
#include <string_view>

namespace lm::test {

inline bool full_counts() {
  const char* counts = std::getenv("LM_COUNTS");
  return counts != nullptr && std::string_view(counts) == "full";
}

// How many, or by which step.
template <class Number>
Number counts(Number in_short, Number in_full) {
  return full_counts() ? in_full : in_short;
}

}  // namespace lm::test
