// The rows of a plan's table of bytes: what of each class is on the device, and what is off it.
#pragma once

#include <fmt/format.h>
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "plan/sizes.h"

namespace lm {

inline constexpr int64_t kPerChecksumByte = 1024;  // off the device: 8 of every kSlotAlignment bytes

// What of a class is off the device.
struct OffDeviceBytes {
  PerTier<int64_t> at = {};
  int64_t whole = 0;  // of all ranks' shards together
  int64_t shard = 0;  // of this rank, in the memory of its device
  bool in_shards = false;
};

inline OffDeviceBytes off_device_bytes(const PoolPlan& pool) {
  OffDeviceBytes out{.whole = pool.whole_bytes()};
  for (size_t t = 0; t < kTierCount; ++t) out.at[t] = pool.off_device_bytes(static_cast<TierId>(t));
  return out;
}
// The same for a pool that may be sharded; `shards`: the pool of the offloaded shards.
inline OffDeviceBytes off_device_bytes(PoolPlan pool, const PoolPlan& shards) {
  if (pool.shards == 1) return off_device_bytes(pool);
  OffDeviceBytes out = off_device_bytes(shards);
  out.whole = pool.whole_bytes();
  out.in_shards = true;
  for (size_t a = 0; a < shards.off_device.size(); ++a)
    if (shards.off_device[a] != 0) pool.off_device[a] = 0;
  out.shard = pool.off_device_bytes();
  return out;
}

// Rows of one class: what of it is on the device, and what is off it.
class ClassTable {
 public:
  explicit ClassTable(const PlacementPlan& placement)
      : placement_(placement), device_tier_(nearest_tier(placement.device)) {}

  bool of_gpu() const { return device_tier_ == TierId::kDevice; }

  // `total` bytes, of which `off` are off the device.
  void add(const std::string& name, int64_t total, const OffDeviceBytes& off, const std::string& note) {
    rows_.push_back({name, total - off.whole + off.shard, note + shards(off.shard > 0), device_tier_});
    for (size_t t = 0; t < kTierCount; ++t)
      if (off.at[t] > 0)
        rows_.push_back({name, off.at[t], note + shards(off.in_shards), static_cast<TierId>(t)});
  }
  void device(const std::string& name, int64_t bytes, const std::string& note) {
    rows_.push_back({name, bytes, note, device_tier_});
  }
  void host(const std::string& name, int64_t bytes, const std::string& note) {
    rows_.push_back({name, bytes, note, TierId::kHost});
  }

  // Above are the first rank's bytes: memory and disks are planned for the rank that has most of a tier.
  void other_ranks() {
    for (size_t t = tier_index(device_tier_); t < kTierCount; ++t) {
      const auto tier_id = static_cast<TierId>(t);
      if (const int64_t more = placement_.more_than_first(tier_id); more > 0)
        rows_.push_back({"longest shards", more, "of whole matrices: another rank has more here", tier_id});
    }
  }

  // Where arrays pass through; from disk to a GPU they pass host memory too.
  void slots() {
    int64_t staging = 0, checked = 0, passing = 0;
    for (int i = 0; i < kPools; ++i) {
      const PoolPlan& pool = placement_.pools[static_cast<size_t>(i)];
      if (pool.slots == 0) continue;
      const bool on_host = placement_.update_on_host && !placement_.shares_updates() &&
                           static_cast<Pool>(i) == Pool::kOptimizer;
      const int64_t bytes = pool.slots * pool.slot_bytes;
      rows_.push_back({std::string(pool_name(static_cast<Pool>(i))) + " slots", bytes,
                       fmt::format("{} x {}", pool.slots, format_bytes(pool.slot_bytes)),
                       on_host ? TierId::kHost : device_tier_});
      const int64_t on_disk = pool.off_device_bytes(Medium::kDisk);
      const bool through_device = device_tier_ == TierId::kDevice && !on_host && pool.shards == 1;
      const int64_t in_host = through_device ? pool.off_device_bytes(Medium::kMemory) : 0;
      checked += on_disk + in_host;
      if (on_disk > 0 && through_device) staging += bytes;
      if (in_host > 0) passing += bytes;
    }
    if (placement_.update_on_host)
      host("update staging", placement_.update_staging, "gradients and weights on their way");
    if (staging > 0) host("staging", staging, "between disk and GPU");
    if (checked > 0)
      host("checksums", (checked + passing) / kPerChecksumByte + checksums_in_common(),
           "of what passes through slots");
  }

  std::vector<ClassBytes> take() { return std::move(rows_); }

 private:
  // Which the rank that fills such memory leaves there for the others.
  int64_t checksums_in_common() const {
    return placement_.common_in_host() / kPerChecksumByte / placement_.frozen_sharers;
  }
  std::string shards(bool some) const {
    if (!some) return "";
    const int ranks =
        std::max(placement_.pool(Pool::kWeights).shards, placement_.pool(Pool::kGradients).shards);
    return fmt::format(", in shards of {} ranks", ranks) + (ranks < placement_.ranks ? " of a machine" : "");
  }

  const PlacementPlan& placement_;
  TierId device_tier_;
  std::vector<ClassBytes> rows_;
};

}  // namespace lm
