// A store whose slots are a GPU's and whose tiers are host memory: what is checked of a tier is what the
// device left there.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "base/bytes.h"
#include "base/cuda.h"
#include "base/error.h"
#include "kernels/kernels.h"
#include "offload/local_store.h"

namespace lm {
namespace {

constexpr int64_t kBytes = 3 * 8192 + 100;

LocalStoreSetup setup(StreamView stream) {
  return {.bytes = {kBytes, kBytes},
          .name = [](int64_t a) { return "array " + std::to_string(a); },
          .slots = 2,
          .slots_on_device = true,
          .in_host = {1, 1},
          .stream = stream,
          .chunk_sums = kernels(DeviceType::kCuda).chunk_sums};
}

struct Fixture {
  Stream compute{DeviceType::kCuda};
  LocalStoreSetup of = setup(compute.view());
  PinnedPool pool{DeviceType::kCuda, LocalStore::pinned_bytes(of) + kMiB};
  LocalStore store{of, nullptr, nullptr, pool};
  PinnedBlock staged = pool.lease(2 * kBytes);

  // The array becomes all `value` on the device, and is on its way back.
  void write(int64_t array, int64_t slot, int value) {
    store.fetch(array, slot);
    compute.synchronize();  // what `staged` held before is there
    std::memset(staged.data(), value, kBytes);
    copy_bytes(store.use(array), staged.data(), kBytes, compute.view());
    store.write_back(array);
  }
};

bool all(const std::vector<std::byte>& bytes, int value) {
  return std::memcmp(bytes.data(), std::vector<std::byte>(bytes.size(), std::byte(value)).data(),
                     bytes.size()) == 0;
}

// The checksums are of the bytes that leave, whoever asks first and however late the copy runs: taken earlier
// they would be those of the generation before, and the next look would call the tier damaged.
TEST(HostTiersOnAGpu, AreComparedWithWhatTheDeviceLeft) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  Fixture f;
  for (int generation = 1; generation < 5; ++generation) {
    f.write(0, 0, generation);
    f.write(1, 1, -generation);
    f.store.fetch(0, 0);  // finishes what is pending
    std::vector<std::byte> out(kBytes);
    copy_bytes(f.staged.data() + kBytes, f.store.use(0), kBytes, f.compute.view());
    f.compute.synchronize();
    std::memcpy(out.data(), f.staged.data() + kBytes, kBytes);
    EXPECT_TRUE(all(out, generation));
    f.store.forget(0);
    f.store.read(0, 0, out);  // compared with the checksums
    EXPECT_TRUE(all(out, generation));
    f.store.fetch(1, 0);
    f.store.read(0, 0, out);
    EXPECT_TRUE(all(out, generation));
  }
}

// Found on the device, before anything is computed from it.
TEST(HostTiersOnAGpu, WhatChangesThereIsNotUsed) {
  std::string reason;
  if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  for (int64_t offset = 0; offset < kBytes; offset += 701) {
    Fixture f;
    f.write(0, 0, 5);
    f.store.flush();
    f.store.forget(0);
    f.pool.memory()[static_cast<size_t>(offset)] ^= std::byte{16};
    f.store.fetch(0, 1);
    try {
      f.store.use(0);
      ADD_FAILURE() << "a byte that changed at " << offset << " is used";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kIntegrity);
      EXPECT_EQ(error.text().place, "host memory");
    }
  }
}

}  // namespace
}  // namespace lm
