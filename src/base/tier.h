// The tiers of memory in which a run's arrays live, as a table. Code asks a tier's row or compares positions.
// It names a tier only where it means that one memory: the GPU's, or the host's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/dtype.h"

namespace lm {

// What a tier consists of. It decides who reaches the tier's arrays, and over which link.
enum class Medium : uint8_t {
  kDevice,  // the GPU's own memory: compute works on the arrays in place
  kMemory,  // pinned memory of the host: the CPU works on them in place, a GPU copies them over its link
  kDisk,    // swap files in the directories of offload.paths: every use reads them into a slot
};

enum class TierId : uint8_t {
#define LM_TIER(tier, ...) tier,
#include "base/tiers.inc"
};

// A choice of offload.*: `auto`, the device itself, or one of the farther tiers.
enum class OffloadTier : uint8_t {
  kAuto,
#define LM_NEAREST_TIER(tier, ...) kNone,
#define LM_TIER(tier, ...) tier,
#include "base/tiers.inc"
};

struct TierRow {
  const char* name;    // in the configuration, and in a plan's JSON
  const char* title;   // of the tier's table in a plan
  const char* memory;  // the resource that a refusal names
  const char* area;    // the tag of that refusal
  const char* note;    // of the tier's peak: whose bytes it counts
  Medium medium;
};

inline constexpr TierRow kTiers[] = {
#define LM_TIER(tier, ...) {__VA_ARGS__},
#include "base/tiers.inc"
};
inline constexpr size_t kTierCount = std::size(kTiers);

// A value for each tier.
template <class T>
using PerTier = std::array<T, kTierCount>;

constexpr size_t tier_index(TierId tier) {
  return static_cast<size_t>(tier);
}
constexpr const TierRow& tier_row(TierId tier) {
  return kTiers[tier_index(tier)];
}

// The tier in which a device computes.
constexpr TierId nearest_tier(DeviceType device) {
  return device == DeviceType::kCuda ? TierId::kDevice : TierId::kHost;
}
constexpr bool is_off_device(TierId tier, DeviceType device) {
  return tier > nearest_tier(device);
}

// Whether a choice names a tier of its own.
constexpr bool names_tier(OffloadTier choice) {
  return choice > OffloadTier::kNone;
}
// The tier that a choice names; the device for "auto" and "none".
constexpr TierId asked_tier(OffloadTier choice, DeviceType device) {
  if (!names_tier(choice)) return nearest_tier(device);
  return static_cast<TierId>(static_cast<size_t>(choice) - static_cast<size_t>(OffloadTier::kNone));
}
// Whether a choice names a tier on the disks of offload.paths.
constexpr bool names_disk(OffloadTier choice) {
  return names_tier(choice) && tier_row(asked_tier(choice, DeviceType::kCpu)).medium == Medium::kDisk;
}

}  // namespace lm
