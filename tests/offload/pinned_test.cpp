#include "offload/pinned.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <utility>

#include "base/error.h"

namespace lm {
namespace {

TEST(PinnedPool, LendsAlignedBlocksUpToItsBudgetAndNoMore) {
  PinnedPool pool(DeviceType::kCpu, 64 * 1024);
  std::vector<PinnedBlock> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(pool.lease(4000));
  for (const PinnedBlock& block : blocks) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block.data()) % PinnedPool::kAlignment, 0u);
    EXPECT_EQ(block.size(), 4000);
    std::memset(block.data(), 1, 4000);
  }
  EXPECT_EQ(pool.leased(), pool.capacity());
  try {
    pool.lease(1);
    FAIL() << "it grew";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kInternal);
  }
  blocks.pop_back();
  EXPECT_NO_THROW(pool.lease(1));
}

TEST(PinnedPool, JoinsWhatComesBackInAnyOrder) {
  PinnedPool pool(DeviceType::kCpu, 32 * 4096);
  std::byte* const first = pool.lease(32 * 4096).data();
  for (const auto& order : {std::vector<int>{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}, {2, 0, 3, 1}}) {
    std::vector<PinnedBlock> blocks;
    for (int i = 0; i < 4; ++i) blocks.push_back(pool.lease(8 * 4096));
    for (int i : order) blocks[static_cast<size_t>(i)].release();
    EXPECT_EQ(pool.lease(32 * 4096).data(), first);
    EXPECT_EQ(pool.leased(), 0);
  }
}

TEST(PinnedPool, TakesABlockBackOnceWhereverItWasMoved) {
  PinnedPool pool(DeviceType::kCpu, 4 * 4096);
  PinnedBlock a = pool.lease(4096), b = pool.lease(4096);
  std::byte* const second = b.data();
  a = std::move(b);
  EXPECT_EQ(a.data(), second);
  EXPECT_EQ(pool.leased(), 4096);
  {
    const PinnedBlock c(std::move(a));
    EXPECT_EQ(pool.leased(), 4096);
  }
  EXPECT_EQ(pool.leased(), 0);
  a.release();
  EXPECT_EQ(pool.leased(), 0);
}

TEST(PinnedPool, LendsToAnyThread) {
  PinnedPool pool(DeviceType::kCpu, 64 * 1024);
  const auto use = [&](int value) {
    for (int i = 0; i < 2000; ++i) {
      const PinnedBlock block = pool.lease(8 * 1024);
      std::memset(block.data(), value, 8 * 1024);
      EXPECT_EQ(std::to_integer<int>(block.data()[i % 8192]), value);
    }
  };
  std::thread other(use, 1);
  use(2);
  other.join();
  EXPECT_EQ(pool.leased(), 0);
}

TEST(PinnedPool, HonoursALargerAlignment) {
  PinnedPool pool(DeviceType::kCpu, 3 * 65536, 65536);
  EXPECT_EQ(pool.capacity(), 3 * 65536);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(reinterpret_cast<uintptr_t>(pool.lease(1).data()) % 65536, 0u);
  EXPECT_FALSE(pool.registered());
}

}  // namespace
}  // namespace lm
