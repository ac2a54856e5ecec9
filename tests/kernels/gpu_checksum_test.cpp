// The GPU's checksums of chunks against the host's, which are the library's.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "base/arena.h"
#include "base/checksum.h"
#include "kernels/kernels.h"

namespace lm {
namespace {

TEST(GpuChecksums, AreTheHosts) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  const Stream stream(DeviceType::kCuda);
  std::mt19937_64 random(1);
  for (const int64_t size :
       {int64_t{1}, int64_t{7}, int64_t{8}, int64_t{1023}, int64_t{8128}, kChecksumChunk - 1, kChecksumChunk,
        kChecksumChunk + 1, 9 * kChecksumChunk, 100 * kChecksumChunk + 4100}) {
    const int64_t chunks = (size + kChecksumChunk - 1) / kChecksumChunk, whole = chunks * kChecksumChunk;
    std::vector<std::byte> bytes(static_cast<size_t>(whole));
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    std::vector<uint64_t> want(static_cast<size_t>(chunks)), found(want.size());
    chunk_sums_cpu({bytes.data(), size, want.data()}, {});
    const Memory array(DeviceType::kCuda, whole), sums(DeviceType::kCuda, chunks * 8);
    copy_bytes(array.data(), bytes.data(), whole, stream.view());
    kernels(DeviceType::kCuda)
        .chunk_sums({array.data(), size, reinterpret_cast<uint64_t*>(sums.data())}, stream.view());
    copy_bytes(found.data(), sums.data(), chunks * 8, stream.view());
    stream.synchronize();
    EXPECT_EQ(found, want) << size;
  }
}

}  // namespace
}  // namespace lm
