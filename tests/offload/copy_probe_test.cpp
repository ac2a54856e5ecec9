#include "offload/copy_probe.h"

#include <gtest/gtest.h>

#include "base/clock.h"

namespace lm {
namespace {

// The GPU's turn is in pinned_gpu_test.cpp; here the copies are memcpy.
TEST(CopyProbe, MeasuresEachWayAndBothForTheTimeItWasGiven) {
  const double start = monotonic_seconds();
  const CopyProbe probe = probe_copies(DeviceType::kCpu, 4 * kMiB, 0.05);
  EXPECT_GE(monotonic_seconds() - start, 0.15);
  EXPECT_FALSE(probe.pinned);
  // A memory's speed: far above a disk's, and below what any machine copies.
  for (double rate : {probe.to_device_bytes_per_s, probe.to_host_bytes_per_s, probe.both_bytes_per_s}) {
    EXPECT_GT(rate, 0.2e9);
    EXPECT_LT(rate, 1e12);
  }
  EXPECT_DOUBLE_EQ(2 * probe.each_way(), probe.both_bytes_per_s);
}

TEST(CopyProbe, MeasuresHostMemoryByAllThreads) {
  const double rate = probe_host_memory(2);
  EXPECT_GT(rate, 0.5e9);
  EXPECT_LT(rate, 5e12);
}

}  // namespace
}  // namespace lm
