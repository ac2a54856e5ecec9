// The table of tiers: what the configuration, a pool of arrays and a plan take from its rows.

#include <gtest/gtest.h>
#include <set>
#include <string>

#include "base/bytes.h"
#include "config/config_names.h"
#include "plan/tier_space.h"
#include "tests/plan/shapes.h"

namespace lm {
namespace {

TEST(Tiers, AreChoicesOfTheConfiguration) {
  std::set<std::string> names;
  for (size_t t = 0; t < kTierCount; ++t) {
    const auto tier = static_cast<TierId>(t);
    const auto choice = static_cast<OffloadTier>(t + static_cast<size_t>(OffloadTier::kNone));
    EXPECT_TRUE(names.insert(kTiers[t].name).second) << kTiers[t].name;
    EXPECT_EQ(names_tier(choice), t > 0);
    if (t == 0) continue;
    EXPECT_EQ(name_of(choice), tier_row(tier).name);
    for (const DeviceType device : {DeviceType::kCpu, DeviceType::kCuda})
      EXPECT_EQ(asked_tier(choice, device), tier);
    EXPECT_EQ(names_disk(choice), tier_row(tier).medium == Medium::kDisk);
  }
  for (const OffloadTier choice : {OffloadTier::kAuto, OffloadTier::kNone}) {
    EXPECT_EQ(asked_tier(choice, DeviceType::kCpu), TierId::kHost);
    EXPECT_EQ(asked_tier(choice, DeviceType::kCuda), TierId::kDevice);
    EXPECT_FALSE(names_tier(choice) || names_disk(choice));
  }
}

TEST(Tiers, OfAPoolHaveEachArrayOnce) {
  PoolPlan pool{.tier_id = static_cast<TierId>(kTierCount - 1),
                .bytes = {8192, 1, 20000, 0, 8192, 40000},
                .off_device = {1, 1, 1, 0, 0, 1}};
  for (const int64_t kept : {0, 2, 6, 9}) {
    pool.kept[tier_index(TierId::kHost)] = kept;
    PerTier<int64_t> by_array = {};
    for (size_t a = 0; a < pool.bytes.size(); ++a)
      if (pool.off_device[a] != 0)
        by_array[tier_index(pool.tier_id_of(a))] += round_up(pool.bytes[a], kSlotAlignment);
    int64_t memory = 0;
    for (size_t t = 0; t < kTierCount; ++t) {
      EXPECT_EQ(pool.off_device_bytes(static_cast<TierId>(t)), by_array[t]) << kTiers[t].name << ' ' << kept;
      if (kTiers[t].medium == Medium::kMemory) memory += by_array[t];
    }
    EXPECT_EQ(pool.off_device_bytes(Medium::kMemory), memory);
    EXPECT_EQ(pool.off_device_bytes(Medium::kMemory) + pool.off_device_bytes(Medium::kDisk),
              pool.off_device_bytes());
  }
  EXPECT_EQ(pool.off_device_bytes(Medium::kDisk), 0);  // all are kept in host memory
}

// A plan lists the tiers that a run uses, nearest first, and its peak counts each by its medium.
TEST(Tiers, OfAPlanMakeItsPeak) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("4090"), .device = DeviceType::kCuda};
  c.config.offload.paths = {"/scratch"};
  c.machine.disks = {{.path = "/scratch", .free_bytes = 1LL << 40}};
  const Plan plan = c.plan();
  ASSERT_EQ(plan.tiers.size(), 3U);
  PeakBytes peak;
  for (size_t t = 0; t < plan.tiers.size(); ++t) {
    if (t > 0) {
      EXPECT_LT(plan.tiers[t - 1].tier_id, plan.tiers[t].tier_id);
    }
    peak.of(tier_row(plan.tiers[t].tier_id).medium) += plan.tiers[t].bytes;
  }
  EXPECT_GT(peak.disk, 0);
  EXPECT_EQ(peak.device, plan.peak.device);
  EXPECT_EQ(peak.host, plan.peak.host);
  EXPECT_EQ(peak.disk, plan.peak.disk);
  c.config.offload.paths.clear();
  for (const Tier& tier : c.draft().tiers) EXPECT_NE(tier_row(tier.tier_id).medium, Medium::kDisk);
}

}  // namespace
}  // namespace lm
