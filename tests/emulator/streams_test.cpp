// The copies of the store and of the host update on streams that are late, early and beside each other:
// whatever the schedule, the bytes must be those of one stream.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <random>

#include "base/bytes.h"
#include "kernels/kernels.h"
#include "offload/local_store.h"
#include "optim/host_update.h"
#include "tests/support/sim_disk.h"
#include "tests/support/update_staging.h"

namespace lm {
namespace {

constexpr DeviceType kGpu = DeviceType::kCuda;

// Arrays go through three device slots, two of them ahead; compute reads and rewrites each on its own stream,
// and nobody looks before the end.
void churn(std::vector<char> in_host, unsigned seed, bool polls) {
  const std::vector<int64_t> bytes{20000, 8192, 40960, 1, 8193, 12288};
  const Stream compute(kGpu);
  LocalStoreSetup setup{.bytes = bytes,
                        .name = [](int64_t a) { return "array " + std::to_string(a); },
                        .slots = 3,
                        .threads = 1,
                        .slots_on_device = true,
                        .in_host = std::move(in_host),
                        .stream = compute.view(),
                        .chunk_sums = kernels(kGpu).chunk_sums};
  const int64_t swap = LocalStore::swap_bytes(bytes, setup.in_host);
  SwapSpace space({{std::filesystem::temp_directory_path().string(), 1}}, std::max<int64_t>(swap, 8192));
  SimDisk disk(space.files(), SimSetup{.faults = {}, .seed = seed, .shuffle = true});
  constexpr int kGenerations = 12;
  constexpr int64_t kMost = 40960;
  const int64_t uses = kGenerations * std::ssize(bytes);
  PinnedPool pool(kGpu, LocalStore::pinned_bytes(setup) + 2 * uses * kMost + (4 << 20));
  IoQueue queue(space, [&] { return disk.make_engine(); }, 4096, {});
  PinnedBlock seen = pool.lease(uses * kMost), news = pool.lease(uses * kMost);
  std::vector<std::vector<std::byte>> want;
  {
    LocalStore store(setup, &space, &queue, pool);
    std::mt19937 random(seed);
    std::vector<std::vector<std::byte>> now;
    for (const int64_t n : bytes) now.emplace_back(static_cast<size_t>(n), std::byte{0});
    const auto array = [&](int64_t use) { return use % std::ssize(bytes); };
    for (int64_t ahead = 0; ahead < 2; ++ahead) store.fetch(array(ahead), ahead % 3);
    for (int64_t u = 0; u < uses; ++u) {
      const int64_t a = array(u), n = bytes[static_cast<size_t>(a)];
      if (u + 2 < uses) store.fetch(array(u + 2), (u + 2) % 3);
      if (polls && random() % 2) store.poll();
      std::byte* const at = store.use(a);
      copy_bytes(seen.data() + u * kMost, at, n, compute.view());
      want.push_back(now[static_cast<size_t>(a)]);
      if (random() % 4 == 0) {  // as a skipped step: nothing new
        store.write_back(a);
        continue;
      }
      for (std::byte& b : now[static_cast<size_t>(a)]) b = static_cast<std::byte>(random());
      std::memcpy(news.data() + u * kMost, now[static_cast<size_t>(a)].data(), static_cast<size_t>(n));
      copy_bytes(at, news.data() + u * kMost, n, compute.view());
      store.write_back(a);
    }
  }
  compute.synchronize();
  for (int64_t u = 0; u < uses; ++u) {
    const auto& w = want[static_cast<size_t>(u)];
    EXPECT_EQ(std::memcmp(seen.data() + u * kMost, w.data(), w.size()), 0)
        << "use " << u << " of array " << u % 6;
  }
}

void churn(const std::vector<char>& in_host) {
  for (unsigned seed = 1; seed < 4; ++seed) {
    SCOPED_TRACE(seed);
    churn(in_host, seed, seed % 2);
  }
}
TEST(Streams, StoreOnDisk) {
  churn({});
}
TEST(Streams, StoreInHostMemory) {
  churn({1, 1, 1, 1, 1, 1});
}
TEST(Streams, StoreInBoth) {
  churn({1, 0, 1, 0, 0, 1});
}

// weights += gradients on the host, while compute goes on to read the new weights and to make new gradients.
TEST(Streams, HostUpdate) {
  const Stream compute(kGpu);
  constexpr int64_t kElements = 100, kTiles = 7, kSteps = 5, kAll = kElements * kTiles;
  PinnedPool pool(kGpu, 1 << 20);
  PinnedBlock staging = pool.lease(update_staging_bytes(kElements, DType::kF32, DType::kF32)),
              log = pool.lease(kSteps * kAll * 4);
  auto* const weights = static_cast<float*>(cuda_allocate(kAll * 4));
  auto* const gradients = static_cast<float*>(cuda_allocate(kAll * 4));
  zero_bytes(weights, kAll * 4, compute.view());
  zero_bytes(gradients, kAll * 4, compute.view());
  std::vector<float> one(kAll);
  for (int64_t i = 0; i < kAll; ++i) one[static_cast<size_t>(i)] = static_cast<float>(i);
  auto* const unit = static_cast<float*>(cuda_allocate(kAll * 4));
  copy_bytes(unit, one.data(), kAll * 4, compute.view());
  {
    HostUpdate update(
        compute.view(),
        {staging.data(), static_cast<size_t>(update_staging_bytes(kElements, DType::kF32, DType::kF32))},
        DType::kF32, DType::kF32);
    for (int64_t step = 0; step < kSteps; ++step) {
      // A gradient of step + 1 units: after step k the weights are k (k + 1) / 2 units.
      kernels(kGpu).accumulate({.to = gradients, .from = unit, .elements = kAll}, compute.view());
      std::vector<HostUpdate::Range> ranges;
      for (int64_t t = 0; t < kTiles; ++t) {
        ranges.push_back({reinterpret_cast<std::byte*>(gradients + t * kElements),
                          reinterpret_cast<std::byte*>(weights + t * kElements), kElements});
      }
      update.begin(ranges, false);
      for (int64_t t = 0; t < kTiles; ++t) {
        const HostUpdate::Range r = update.next();
        kernels(DeviceType::kCpu)
            .accumulate({.to = r.weights, .from = r.gradients, .elements = kElements}, {});
        update.send();
      }
      copy_bytes(log.data() + step * kAll * 4, weights, kAll * 4, compute.view());
    }
  }
  compute.synchronize();
  int wrong = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    for (int64_t i = 0; i < kAll; ++i) {
      const float got = reinterpret_cast<const float*>(log.data())[step * kAll + i];
      if (got != static_cast<float>(i * (step + 1) * (step + 2) / 2) && ++wrong < 4)
        ADD_FAILURE() << "step " << step << " element " << i << " is " << got;
    }
  }
  for (void* p : {static_cast<void*>(weights), static_cast<void*>(gradients), static_cast<void*>(unit)})
    cuda_free(p);
}

}  // namespace
}  // namespace lm
