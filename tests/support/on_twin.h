// Whether a test of GPU code runs on the twin (tests/twin), whose streams are threads on cores that have
// other work: what a test says of time holds on a real GPU alone, or with more slack.
#pragma once

// Part of the twin's runtime, and absent elsewhere.
namespace twin {
__attribute__((weak)) const char* current_operation();
}

namespace lm {
inline bool on_twin() {
  return twin::current_operation != nullptr;
}
}  // namespace lm
