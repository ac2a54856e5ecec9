// Whether a test of GPU code runs on the emulator (tests/emulator), whose streams are threads on cores that
// have other work: what a test says of time holds on a real GPU alone, or with more slack.
#pragma once

// Part of the emulator's runtime, and absent elsewhere.
namespace emulator {
__attribute__((weak)) const char* current_operation();
}

namespace lm {
inline bool on_emulator() {
  return emulator::current_operation != nullptr;
}
}  // namespace lm
