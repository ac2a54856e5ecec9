// The emulator must find what it is for: kernels with one mistake each. What stops a grid fails every later
// call of its process, so such a case runs in one of its own.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "base/error.h"
#include "tests/emulator/child.h"
#include "tests/emulator/device/simt.h"
#include "tests/emulator/emulator.h"
#include "tests/emulator/self_kernels.h"

namespace lm::gpu {
namespace {

using emulator::in_child;

// Launches on 64 floats and waits; throws what CUDA says.
std::vector<float> run(SelfKernel kernel) {
  const Stream stream(DeviceType::kCuda);
  auto* const x = static_cast<float*>(cuda_allocate(kFloats * 4));
  launch_self(kernel, x, stream.view());
  std::vector<float> result(kFloats);
  copy_bytes(result.data(), x, kFloats * 4, stream.view());
  stream.synchronize();
  cuda_free(x);
  return result;
}
int run_to_code(SelfKernel kernel) {
  run(kernel);
  return 0;
}

// The process must end with an error, and say `message`.
void expect_found(SelfKernel kernel, const char* message) {
  EXPECT_EXIT(in_child("", [&] { return run_to_code(kernel); }), ::testing::ExitedWithCode(emulator::kFailed),
              message);
}

TEST(KernelsOnTheEmulatorDeathTest, ThreadsThatDoNotMeetAreFound) {
  expect_found(SelfKernel::kEarlyReturn, "has exited");
  expect_found(SelfKernel::kTwoBarriers, "different barriers");
  expect_found(SelfKernel::kExitedLane, "lane 31, which has exited");
  expect_found(SelfKernel::kUnnamedLane, "a mask that does not name it");
  expect_found(SelfKernel::kWaitsInAWarp, "waits at a warp call");
}

TEST(KernelsOnTheEmulatorDeathTest, AccessesOutsideAnAllocationAreFoundToTheByte) {
  expect_found(SelfKernel::kPastEnd, "thread \\(63,0,0\\) writes 4 bytes at .*, where no allocation is");
  expect_found(SelfKernel::kBeforeBegin, "thread \\(0,0,0\\) writes 4 bytes at .*, where no allocation is");
  expect_found(SelfKernel::kWidePastEnd, "thread \\(63,0,0\\) writes 16 bytes at .*, where no allocation is");
  expect_found(SelfKernel::kFarPastEnd, "where no allocation is");
}

TEST(KernelsOnTheEmulatorDeathTest, MisalignedAccessesAreFound) {
  expect_found(SelfKernel::kMisalignedPack, "writes 16 bytes at .*, which is no multiple of its size");
  expect_found(SelfKernel::kMisalignedFloat, "writes 4 bytes at .*, which is no multiple of its size");
}

TEST(KernelsOnTheEmulatorDeathTest, PointersThatTheDeviceCannotUseAreFound) {
  const auto launch_on = [](float* x) {
    const Stream stream(DeviceType::kCuda);
    launch_self(SelfKernel::kTwice, x, stream.view());
    stream.synchronize();
    return 0;
  };
  const auto on_the_heap = [&] { return launch_on(std::make_unique<float[]>(kFloats).get()); };
  const auto freed = [&] {
    void* const x = cuda_allocate(kFloats * 4);
    cuda_free(x);
    return launch_on(static_cast<float*>(x));
  };
  for (const std::function<int()>& body : {std::function<int()>(on_the_heap), std::function<int()>(freed)}) {
    EXPECT_EXIT(in_child("", body), ::testing::ExitedWithCode(emulator::kFailed),
                "which the device cannot use");
  }
}

TEST(KernelsOnTheEmulatorDeathTest, TwoStreamsOnOneArrayAreARace) {
  const auto both = [](bool waits) {
    const Stream a(DeviceType::kCuda), b(DeviceType::kCuda);
    auto* const x = static_cast<float*>(cuda_allocate(kFloats * 4));
    launch_self(SelfKernel::kTwice, x, a.view());
    Event done(DeviceType::kCuda);
    done.record(a.view());
    if (waits) done.wait(b.view());
    launch_self(SelfKernel::kTwice, x, b.view());
    b.synchronize();
    a.synchronize();
    return 0;
  };
  EXPECT_EXIT(in_child("EMULATOR_RACES=2", [&] { return both(true); }), ::testing::ExitedWithCode(0), "");
  EXPECT_EXIT(in_child("EMULATOR_RACES=2", [&] { return both(false); }), ::testing::ExitedWithCode(86),
              "RACE");
}

TEST(KernelsOnTheEmulator, ImpossibleGridsAreRefused) {
  const Stream stream(DeviceType::kCuda);
  float* const none = nullptr;
  EXPECT_THROW(launch_self(SelfKernel::kTwice, none, stream.view(), 65536), Error);
  EXPECT_THROW(launch_self(SelfKernel::kTwice, none, stream.view(), 1, 1025), Error);
}

TEST(KernelsOnTheEmulator, SharedMemoryIsNotZero) {
  const std::vector<float> x = run(SelfKernel::kUninitialised);
  EXPECT_TRUE(std::isnan(x[0]));
  EXPECT_EQ(x[1], 1);
}

TEST(KernelsOnTheEmulator, AnOrderOfThreadsShowsAMissingBarrier) {
  const auto in = [](emulator::simt::Order order) {
    emulator::simt::settings().order = order;
    std::vector<float> x = run(SelfKernel::kMissingBarrier);
    emulator::simt::settings().order = emulator::simt::Order::kForward;
    for (float& value : x) value = std::isnan(value) ? -1 : value;
    return x;
  };
  EXPECT_NE(in(emulator::simt::Order::kForward), in(emulator::simt::Order::kReverse));
}

TEST(KernelsOnTheEmulator, TheirBytesAreCounted) {
  emulator::reset_counters();
  run(SelfKernel::kTwice);
  int64_t bytes = 0;
  for (const auto& [name, of_it] : emulator::counters().by_name)
    bytes += name.starts_with("copy") ? 0 : of_it.bytes;
  EXPECT_EQ(bytes, 2 * kFloats * 4);
  EXPECT_EQ(emulator::counters().launches, 1);
}

}  // namespace
}  // namespace lm::gpu
