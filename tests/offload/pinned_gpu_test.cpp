#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/cuda.h"
#include "offload/copy_probe.h"
#include "offload/pinned.h"
#include "tests/support/on_emulator.h"

namespace lm {
namespace {

TEST(PinnedPoolOnAGpu, IsRegisteredOnceAndCopiesBothWays) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  PinnedPool pool(DeviceType::kCuda, 64 * kMiB);
  EXPECT_TRUE(pool.registered(&reason)) << reason;
  EXPECT_FALSE(cuda_register_host(pool.memory().data(), 4096));  // it already is
  PinnedBlock out = pool.lease(8 * kMiB), in = pool.lease(8 * kMiB);
  std::memset(out.data(), 0x5A, 8 * kMiB);
  std::memset(in.data(), 0, 8 * kMiB);
  const Stream stream(DeviceType::kCuda);
  const Memory device(DeviceType::kCuda, 8 * kMiB);
  copy_bytes(device.data(), out.data(), 8 * kMiB, stream.view());
  copy_bytes(in.data(), device.data(), 8 * kMiB, stream.view());
  stream.synchronize();
  EXPECT_EQ(std::memcmp(out.data(), in.data(), 8 * kMiB), 0);
}

TEST(CopiesOnAGpu, AreMeasuredEachWayAndBothAtOnce) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  const CopyProbe probe = probe_copies(DeviceType::kCuda);
  EXPECT_TRUE(probe.pinned) << probe.pinned_reason;
  if (on_emulator()) return;  // its copies are memcpy on cores that have other work
  // The slowest link in use is PCIe 3 x4 (3.9 GB/s), the fastest NVLink-C2C (450 GB/s each way).
  for (double rate : {probe.to_device_bytes_per_s, probe.to_host_bytes_per_s, probe.each_way()}) {
    EXPECT_GT(rate, 1e9);
    EXPECT_LT(rate, 500e9);
  }
  // Two copy engines: together more than the slower one alone.
  EXPECT_GT(probe.both_bytes_per_s, std::min(probe.to_device_bytes_per_s, probe.to_host_bytes_per_s));
}

}  // namespace
}  // namespace lm
