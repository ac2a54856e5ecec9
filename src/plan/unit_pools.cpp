#include "plan/unit_pools.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"
#include "plan/limits.h"
#include "plan/update_work.h"

namespace lm {
namespace {

int64_t size_of(DType type) {
  return static_cast<int64_t>(dtype_size(type));
}

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
  int64_t longest = 0;
  void add(int64_t bytes, int64_t of_any) {
    first.push_back(bytes);
    longest = std::max(longest, of_any);
  }
  // Where the first rank has nothing, another one has something: the array is there.
  void add(const Unit& unit, const Sharding& sharding, int64_t size) {
    add(std::max<int64_t>(shard_of(unit, sharding, 0).elements * size, 1),
        longest_shard(unit, sharding) * size);
  }
};

// Whole arrays of which each rank has a shard on that tier.
void place_shards(const PlanInput& in, TierId tier_id, Pool which, std::vector<int64_t> bytes,
                  ShardBytes shards, Plan& plan) {
  PoolPlan& pool = plan.placement.pool(which);
  // Whole arrays exist in slots alone, on every device.
  pool = make_pool(TierId::kHost, std::move(bytes), kSlots, DeviceType::kCuda);
  pool.shards = sharding_of(in).group;
  pool.shard_bytes = shards.first;
  if (!is_off_device(tier_id, in.device)) return;
  PoolPlan& on_tier = plan.placement.pool(*shards_of(which));
  on_tier = make_pool(tier_id, std::move(shards.first), kSlots, in.device);
  on_tier.slot_bytes = round_up(shards.longest, kSlotAlignment);
}

bool shards_weights(const PlanInput& in) {
  return sharding_of(in).group > 1 && in.config.zero.stage >= 3 && in.trains();
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

bool shards_gradients(const PlanInput& in, const Plan& plan) {
  const int64_t micro_batches = plan.numerics.micro_batches;
  return sharding_of(in).group > 1 && in.config.zero.stage >= 2 && in.trains() && in.adapter == nullptr &&
         (micro_batches == 1 || plan.recompute().whole()) && micro_batches <= kMostInGroup;
}

void place_weights(const PlanInput& in, TierId tier_id, Plan& plan) {
  std::vector<int64_t> bytes;
  ShardBytes shard_bytes;
  const bool shards = shards_weights(in);
  const Sharding sharding = sharding_of(in);
  const DType trained = plan.numerics.trained_dtype();
  plan.placement.frozen_arrays.clear();
  for (const Unit& unit : units_for_slots(in, shards || is_off_device(tier_id, in.device))) {
    const bool frozen = moves_frozen(in.layout.blocks[static_cast<size_t>(unit.block)], unit, trained);
    plan.placement.frozen_arrays.push_back(frozen ? 1 : 0);
    bytes.push_back(frozen                  ? unit.frozen_bytes
                    : in.adapter != nullptr ? 0
                                            : unit.elements * size_of(trained));
    const int64_t frozen_shard = frozen_shard_of(frozen ? bytes.back() : 0, 0, sharding.group).elements;
    frozen || bytes.back() == 0 ? shard_bytes.add(frozen_shard, frozen_shard)
                                : shard_bytes.add(unit, sharding, size_of(trained));
  }
  plan.placement.pool(Pool::kWeightShards) = {};
  if (shards) {
    place_shards(in, tier_id, Pool::kWeights, std::move(bytes), std::move(shard_bytes), plan);
  } else {
    plan.placement.pool(Pool::kWeights) = make_pool(tier_id, std::move(bytes), kSlots, in.device);
  }
  // A tied embedding is the head's matrix too, which every row is multiplied by: it stays on the device.
  const bool leaves = in.device == DeviceType::kCuda && is_off_device(tier_id, in.device) && !in.spec.tied;
  const BlockLayout& embedding = in.layout.blocks.front();
  plan.placement.embedding_in_host = !leaves ? 0
                                     : embedding.frozen_bytes > 0
                                         ? embedding.frozen_bytes
                                         : embedding.flat_elements * size_of(trained);
}

void place_gradients(const PlanInput& in, TierId tier_id, bool shards, Plan& plan) {
  std::vector<int64_t> bytes;
  ShardBytes shard_bytes;
  const int64_t size = size_of(plan.numerics.gradient_dtype);
  for (const Unit& unit : units_for_slots(in, shards || is_off_device(tier_id, in.device))) {
    bytes.push_back(in.adapter != nullptr ? 0 : unit.elements * size);
    bytes.back() == 0 ? shard_bytes.add(0, 0) : shard_bytes.add(unit, sharding_of(in), size);
  }
  plan.placement.pool(Pool::kGradientShards) = {};
  if (shards) {
    place_shards(in, tier_id, Pool::kGradients, std::move(bytes), std::move(shard_bytes), plan);
  } else {
    plan.placement.pool(Pool::kGradients) = make_pool(tier_id, std::move(bytes), kSlots, in.device);
  }
}

Pool tier_pool(const PlacementPlan& placement, Pool whole) {
  return placement.pool(whole).shards > 1 ? *shards_of(whole) : whole;
}

}  // namespace lm
