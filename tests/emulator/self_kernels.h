// Kernels with one mistake each, which the emulator must find (self_test.cpp), and one without.
#pragma once

#include <cstdint>

#include "base/cuda.h"

namespace lm::gpu {

inline constexpr int64_t kFloats = 64;  // that they work on, with a thread each

enum class SelfKernel : uint8_t {
  kEarlyReturn,
  kTwoBarriers,
  kExitedLane,
  kUnnamedLane,
  kWaitsInAWarp,
  kMissingBarrier,
  kUninitialised,
  kPastEnd,
  kBeforeBegin,
  kWidePastEnd,
  kFarPastEnd,
  kMisalignedPack,
  kMisalignedFloat,
  kTwice,
};
// In a grid of 1 x `rows` blocks of `block` threads. Throws where CUDA refuses.
void launch_self(SelfKernel kernel, float* x, StreamView stream, unsigned rows = 1, int block = kFloats);

}  // namespace lm::gpu
