#include "plan/unit_pools.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "plan/limits.h"
#include "plan/update_work.h"

namespace lm {
namespace {

bool cuts_head(const PlanInput& in) {
  // An adapter of the head lies with its norm, and each segment would need it.
  if (in.spec.scores() || in.layout.blocks.back().trains("head.lora_A")) return false;
  return !in.trains() || in.adapter != nullptr ||
         !updates_whole(in.config.optimizer.name, in.layout.blocks.back());
}

// What can live off the device of weights and gradients: the transformer blocks, and an untied head's matrix
// by segments. The embedding is looked up in its tier, without a slot; a final norm is worth no transfer.
std::vector<Unit> units_for_slots(const PlanInput& in, bool through_slots) {
  std::vector<Unit> units = in.layout.units(through_slots && cuts_head(in));
  for (Unit& unit : units) {
    if (unit.role != UnitRole::kBody && !unit.segment()) unit = {};
  }
  return units;
}

// Bytes of a shard of each array: the first rank's, and any rank's longest.
struct ShardBytes {
  std::vector<int64_t> first;
  std::vector<std::vector<PlaceBytes>> places;  // PoolPlan's
  int64_t longest = 0;
  void add(int64_t bytes, int64_t of_any) {
    first.push_back(bytes);
    longest = std::max(longest, of_any);
  }
  void add(const Unit& unit, const Sharding& sharding, int64_t size) {
    if (!sharding.of_whole_tensors(unit)) {
      const int64_t bytes = shard_of(unit, sharding, 0).elements * size;
      return add(std::max<int64_t>(bytes, 1), bytes);
    }
    const std::vector<Shard> shards = shards_of_unit(unit, sharding);
    places.resize(first.size());
    std::vector<PlaceBytes>& of_places = places.emplace_back();
    int64_t most = 0;
    for (size_t place = 0; place < shards.size(); ++place) {
      const int64_t bytes = shards[place].elements * size;
      if (bytes > 0) of_places.push_back({static_cast<int>(place), bytes});
      most = std::max(most, bytes);
    }
    // Where the first rank has nothing, another one has something: the array is there.
    add(std::max<int64_t>(shards.front().elements * size, 1), most);
  }
};

// Arrays on that tier; `shards`: whole ones of which each rank has a shard of so many bytes there.
UnitPools make_pools(const PlanInput& in, TierId tier_id, bool shards, std::vector<int64_t> bytes,
                     ShardBytes shard_bytes) {
  if (!shards) return {make_pool(tier_id, std::move(bytes), kSlots, in.device), {}};
  // Whole arrays exist in slots alone, on every device.
  UnitPools out{make_pool(TierId::kHost, std::move(bytes), kSlots, DeviceType::kCuda), {}};
  out.whole.shards = sharding_of(in).group;
  out.whole.shard_bytes = shard_bytes.first;
  if (!shard_bytes.places.empty()) shard_bytes.places.resize(shard_bytes.first.size());
  if (!is_off_device(tier_id, in.device)) {
    out.whole.places = std::move(shard_bytes.places);
    return out;
  }
  out.shards = make_pool(tier_id, std::move(shard_bytes.first), kSlots, in.device);
  out.shards.places = std::move(shard_bytes.places);
  out.shards.slot_bytes = round_up(shard_bytes.longest, kSlotAlignment);
  return out;
}

bool shards_weights(const PlanInput& in) {
  return sharding_of(in).group > 1 && in.config.zero.stage >= 3 && in.trains();
}

std::vector<Unit> weight_units(const PlanInput& in, TierId tier_id) {
  return units_for_slots(in, shards_weights(in) || is_off_device(tier_id, in.device));
}

bool is_frozen(const PlanInput& in, const NumericsPlan& numerics, const Unit& unit) {
  return moves_frozen(in.layout.blocks[static_cast<size_t>(unit.block)], unit, numerics.trained_dtype());
}

}  // namespace

Sharding sharding_of(const PlanInput& in) {
  const bool machine = in.config.zero.group == ZeroGroup::kMachine;
  return {in.world.ranks, machine ? in.world.ranks_per_node() : in.world.ranks,
          whole_tensors(in.config.optimizer.name)};
}

PoolPlan make_pool(TierId tier_id, std::vector<int64_t> bytes, int64_t slots, DeviceType device) {
  PoolPlan pool;
  pool.tier_id = tier_id;
  pool.bytes = std::move(bytes);
  pool.off_device.assign(pool.bytes.size(), 0);
  if (!is_off_device(tier_id, device)) return pool;
  int64_t count = 0;
  for (size_t a = 0; a < pool.bytes.size(); ++a) {
    if (pool.bytes[a] == 0) continue;
    pool.off_device[a] = 1;
    ++count;
    pool.slot_bytes = std::max(pool.slot_bytes, round_up(pool.bytes[a], kSlotAlignment));
  }
  pool.slots = std::min(slots, count);
  return pool;
}

bool shards_gradients(const PlanInput& in, const NumericsPlan& numerics, const RecomputeChoice& recompute) {
  const int64_t micro_batches = numerics.micro_batches;
  return sharding_of(in).group > 1 && in.config.zero.stage >= 2 && in.trains() && in.adapter == nullptr &&
         (micro_batches == 1 || recompute.whole()) && micro_batches <= kMostInGroup;
}

UnitPools weight_pools(const PlanInput& in, const NumericsPlan& numerics, TierId tier_id) {
  std::vector<int64_t> bytes;
  ShardBytes shard_bytes;
  const Sharding sharding = sharding_of(in);
  const int64_t size = size_of(numerics.trained_dtype());
  for (const Unit& unit : weight_units(in, tier_id)) {
    const bool frozen = is_frozen(in, numerics, unit);
    const int64_t of_base = shards_weights(in) ? unit.common_bytes() : unit.frozen_bytes;
    bytes.push_back(frozen ? of_base : in.adapter != nullptr ? 0 : unit.elements * size);
    const int64_t frozen_shard = frozen_shard_of(frozen ? bytes.back() : 0, 0, sharding.group).elements;
    frozen || bytes.back() == 0 ? shard_bytes.add(frozen_shard, frozen_shard)
                                : shard_bytes.add(unit, sharding, size);
  }
  return make_pools(in, tier_id, shards_weights(in), std::move(bytes), std::move(shard_bytes));
}

UnitPools gradient_pools(const PlanInput& in, const NumericsPlan& numerics, TierId tier_id, bool shards) {
  std::vector<int64_t> bytes;
  ShardBytes shard_bytes;
  const int64_t size = size_of(numerics.gradient_dtype);
  for (const Unit& unit : units_for_slots(in, shards || is_off_device(tier_id, in.device))) {
    bytes.push_back(in.adapter != nullptr ? 0 : unit.elements * size);
    bytes.back() == 0 ? shard_bytes.add(0, 0) : shard_bytes.add(unit, sharding_of(in), size);
  }
  return make_pools(in, tier_id, shards, std::move(bytes), std::move(shard_bytes));
}

std::vector<char> frozen_arrays(const PlanInput& in, const NumericsPlan& numerics, TierId tier_id) {
  std::vector<char> out;
  for (const Unit& unit : weight_units(in, tier_id)) out.push_back(is_frozen(in, numerics, unit) ? 1 : 0);
  return out;
}

bool may_share_frozen(const PlanInputs& in, PlanPurpose purpose) {
  const bool writes_rows = in.adapter != nullptr && !in.adapter->tokens.empty();
  const bool in_host = in.device == DeviceType::kCpu || in.config.offload.weights != OffloadTier::kNone;
  const bool alike = !in.layout.experts.parallel();  // else each rank's has experts of its own
  return in_host && purpose == PlanPurpose::kTrain && in.layout.frozen_bytes > 0 && !writes_rows && alike;
}

int frozen_sharers(const PlanInput& in) {
  const World& world = in.world;
  const bool shared = may_share_frozen(in, in.purpose) && world.by_machine && world.share_memory;
  return shared ? world.ranks_per_node() : 1;
}

int64_t embedding_in_host(const PlanInput& in, const NumericsPlan& numerics, TierId tier_id) {
  // A tied embedding is the head's matrix too, which every row is multiplied by: it stays on the device.
  if (in.device != DeviceType::kCuda || !is_off_device(tier_id, in.device) || in.spec.tied) return 0;
  const BlockLayout& embedding = in.layout.blocks.front();
  return embedding.frozen_bytes > 0 ? embedding.frozen_bytes
                                    : embedding.flat_elements * size_of(numerics.trained_dtype());
}

Pool tier_pool(const PlacementPlan& placement, Pool whole) {
  return placement.pool(whole).shards > 1 ? *shards_of(whole) : whole;
}

}  // namespace lm
