// How kernels run on the emulator where CUDA leaves it open: the order of blocks and threads. Defined beside
// the kernels (lm_device_emulator), so for the emulator's builds alone.
#pragma once

#include <cstdint>

namespace emulator::simt {

// The order of a grid's blocks, of a block's warps and of a warp's lanes between two points where they meet.
enum class Order : uint8_t { kForward, kReverse, kRandom };

struct Settings {
  Order order = Order::kForward;
  uint32_t seed = 1;  // of kRandom
};
// EMULATOR_THREADS=forward|reverse|random:SEED at first. Read when a kernel runs: a test that sets it waits
// for its streams first.
Settings& settings();

}  // namespace emulator::simt
