#include <gtest/gtest.h>

#include <cstring>

#include "base/bytes.h"
#include "base/cuda.h"
#include "offload/pinned.h"

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

}  // namespace
}  // namespace lm
