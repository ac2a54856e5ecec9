#include "offload/copy_probe.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/clock.h"

namespace lm {
namespace {

// The GPU's turn is in pinned_gpu_test.cpp; here the copies are memcpy.
TEST(CopyProbe, MeasuresEachWayAndBothForTheTimeItWasGiven) {
  const double start = monotonic_seconds();
  const CopyProbe probe = probe_copies(DeviceType::kCpu, 4 * kMiB, 0.05);
  EXPECT_GE(monotonic_seconds() - start, 0.15);
  EXPECT_FALSE(probe.pinned);
  EXPECT_DOUBLE_EQ(2 * probe.each_way(), probe.both_bytes_per_s);
  // A memory's speed: far above a disk's, and below what any machine copies. Of three probes, as a machine
  // that others use, too, may be gone for all of 0.05 s.
  double fastest[3] = {};
  for (int i = 0; i < 3; ++i) {
    const CopyProbe again = probe_copies(DeviceType::kCpu, 4 * kMiB, 0.05);
    const double rates[] = {again.to_device_bytes_per_s, again.to_host_bytes_per_s, again.both_bytes_per_s};
    for (int way = 0; way < 3; ++way) {
      EXPECT_LT(rates[way], 1e12);
      fastest[way] = std::max(fastest[way], rates[way]);
    }
  }
  for (double rate : fastest) EXPECT_GT(rate, 0.2e9);
}

TEST(CopyProbe, MeasuresHostMemoryByAllThreads) {
  double rate = 0;  // of some probes, as above
  for (int i = 0; i < 20 && rate < 0.5e9; ++i) rate = std::max(rate, probe_host_memory(2));
  EXPECT_GT(rate, 0.5e9);
  EXPECT_LT(rate, 5e12);
}

}  // namespace
}  // namespace lm
