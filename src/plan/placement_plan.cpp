#include "plan/placement_plan.h"

#include <fmt/format.h>
#include <algorithm>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {

const char* state_class_name(StateClass state) {
  constexpr const char* kNames[] = {"weights", "frozen weights", "gradients", "optimizer", "activations"};
  return kNames[static_cast<size_t>(state)];
}

// A tier has the arrays from one boundary to the next: a planner asks this for every candidate, mostly of
// tiers that have none.
int64_t PoolPlan::off_device_bytes(TierId at) const {
  if (at == TierId::kDevice || at > tier_id) return 0;
  const auto boundary = [&](size_t tier) { return std::min(static_cast<size_t>(kept[tier]), bytes.size()); };
  const size_t begin = boundary(tier_index(at) - 1);
  const size_t end = at == tier_id ? bytes.size() : boundary(tier_index(at));
  int64_t sum = 0;
  for (size_t a = begin; a < end; ++a) {
    if (off_device[a] != 0) sum += round_up(shards > 1 ? shard_bytes[a] : bytes[a], kSlotAlignment);
  }
  return sum;
}

int64_t PoolPlan::off_device_bytes() const {
  int64_t sum = 0;
  for (size_t t = 0; t <= tier_index(tier_id); ++t) sum += off_device_bytes(static_cast<TierId>(t));
  return sum;
}

int64_t PoolPlan::off_device_bytes(Medium medium) const {
  int64_t sum = 0;
  for (size_t t = 0; t <= tier_index(tier_id); ++t)
    if (kTiers[t].medium == medium) sum += off_device_bytes(static_cast<TierId>(t));
  return sum;
}

int64_t PoolPlan::whole_bytes() const {
  int64_t sum = 0;
  for (size_t a = 0; a < bytes.size(); ++a) sum += off_device[a] != 0 ? bytes[a] : 0;
  return sum;
}

BytesOfPlaces::BytesOfPlaces(const PoolPlan& pool) {
  for (size_t a = 0; a < pool.bytes.size(); ++a)
    if (pool.off_device[a] != 0) add(pool, a, false);
}

void BytesOfPlaces::count(const PoolPlan& pool, size_t array, bool off_device, int64_t times) {
  const auto there = [&](int64_t bytes) {
    // Where a rank has nothing, the array is there all the same.
    return off_device ? round_up(std::max<int64_t>(bytes, 1), kSlotAlignment) : bytes;
  };
  if (pool.places.empty() || pool.places[array].empty()) {
    common_ += times * there(pool.shards > 1 ? pool.shard_bytes[array] : pool.bytes[array]);
    return;
  }
  common_ += times * there(0);
  for (const PlaceBytes& of : pool.places[array]) {
    const auto place = static_cast<size_t>(of.place);
    beyond_.resize(std::max(beyond_.size(), place + 1));
    beyond_[place] += times * (there(of.bytes) - there(0));
  }
}

int64_t BytesOfPlaces::most() const {
  return common_ + std::ranges::max(beyond_);
}

int64_t PlacementPlan::more_than_first(TierId tier) const {
  BytesOfPlaces sum;
  for (const PoolPlan& plan : pools) {
    for (size_t a = 0; a < plan.places.size(); ++a) {
      // Whole arrays in shards are in slots alone, and what they are made of lies on the device.
      const bool off = plan.off_device[a] != 0 && plan.shards == 1;
      const TierId here = off ? plan.tier_id_of(a) : nearest_tier(device);
      if (here == tier && !plan.places[a].empty()) sum.add(plan, a, off);
    }
  }
  return sum.most() - sum.first();
}

int64_t PlacementPlan::head_segments() const {
  for (const Pool which : {Pool::kWeights, Pool::kGradients}) {
    const PoolPlan& arrays = pool(which);
    const int64_t segments = arrays.slots > 0 ? std::ssize(arrays.off_device) - blocks : 0;
    if (segments > 0 && std::count(arrays.off_device.end() - segments, arrays.off_device.end(), 1) > 0)
      return segments;
  }
  return 0;
}

PoolShape PlacementPlan::through(Pool which) const {
  if (pool(which).slots == 0) return {};
  return {through_slots(which), pool(which).slots};
}

TimelineShape PlacementPlan::timeline() const {
  TimelineShape shape;
  for (int p = 0; p < kPools; ++p) {
    const PoolPlan& plan = pool(static_cast<Pool>(p));
    for (size_t a = 0; a < plan.bytes.size(); ++a)
      shape.arrays[static_cast<size_t>(p)].push_back(
          {plan.bytes[a], tier_row(plan.tier_id_of(a)).medium == Medium::kDisk, plan.shards > 1});
  }
  const PoolPlan& tiles = pool(Pool::kOptimizer);
  for (size_t a = 0; update_on_host && a < tiles.bytes.size(); ++a) {
    const int64_t elements = granules[a] * kGranule;
    shape.host_updates.push_back({host_updates(a), elements * update_brings, elements * update_sends});
  }
  shape.host_slots = update_on_host && !shares_updates();
  return shape;
}

std::vector<char> PlacementPlan::through_slots(Pool which) const {
  const PoolPlan& plan = pool(which);
  std::vector<char> out = plan.off_device;
  for (size_t a = 0; a < out.size(); ++a) {
    const bool in_place = tier_row(plan.tier_id_of(a)).medium == Medium::kMemory;
    if (which == Pool::kOptimizer && in_place && host_updates(a)) out[a] = 0;
  }
  return out;
}

std::vector<ScheduleUnit> PlacementPlan::units() const {
  LM_CHECK(blocks >= 2, "a placement is of a model's blocks");
  std::vector<ScheduleUnit> out = schedule_units(blocks - 2, head_segments());
  const PoolPlan& weights = pool(Pool::kWeights);
  for (size_t u = 0; u < out.size() && weights.slots > 0; ++u) {
    out[u].frozen = frozen_array(static_cast<int64_t>(u));
    out[u].in_shards = weights.shards > 1 && !out[u].frozen && weights.off_device[u] != 0;
  }
  if (first_tile.empty()) return out;
  const std::vector<char>& off_device = pool(Pool::kOptimizer).off_device;
  auto segment_tile = segment_tiles.begin();
  for (ScheduleUnit& unit : out) {
    const auto block = first_tile.begin() + unit.block;
    const auto begin = off_device.begin() + block[0], end = off_device.begin() + block[1];
    unit.off_device = std::any_of(begin, end, [](char s) { return s != 0; });
    if (unit.role == UnitRole::kVocabularySegment) {
      unit.first_tile = segment_tile[0], unit.end_tile = segment_tile[1];
      ++segment_tile;
    } else if (unit.role == UnitRole::kFinalNorm) {
      unit.first_tile = segment_tiles.end()[-2], unit.end_tile = segment_tiles.back();
    } else {
      // Nothing of a frozen block is updated.
      unit.end_tile = unit.off_device ? end - begin : std::min<int64_t>(end - begin, 1);
    }
  }
  return out;
}

int64_t PlacementPlan::gradient_elements(const ModelLayout& layout) const {
  if (!in_backward()) return layout.flat_elements;
  int64_t slot = 0, own = 0;
  for (size_t b = defer_tied_gradient ? 1 : 0; b < layout.blocks.size(); ++b) {
    const int64_t elements = layout.blocks[b].flat_elements;
    gradients_in_slot[b] != 0 ? slot = std::max(slot, elements) : own += elements;
  }
  return slot + own;
}

int64_t PlacementPlan::common_in_host() const {
  const PoolPlan& weights = pool(Pool::kWeights);
  int64_t sum = 0;
  for (size_t a = 0; frozen_sharers > 1 && device == DeviceType::kCuda && a < weights.bytes.size(); ++a) {
    if (weights.off_device[a] != 0 && sharers(Pool::kWeights, a, weights.tier_id_of(a)) > 1)
      sum += round_up(weights.bytes[a], kSlotAlignment);
  }
  return sum;
}

bool PlacementPlan::uses(TierId tier) const {
  return std::any_of(pools.begin(), pools.end(),
                     [&](const PoolPlan& pool) { return pool.off_device_bytes(tier) > 0; });
}

bool PlacementPlan::on_disk() const {
  return std::any_of(pools.begin(), pools.end(),
                     [](const PoolPlan& pool) { return pool.off_device_bytes(Medium::kDisk) > 0; });
}

namespace {

std::string input_name(const PlacementPlan& placement, int64_t place, const auto& block_name) {
  const InputPlaces& inputs = placement.inputs;
  if (place < inputs.shared()) return "input of a block before " + block_name(inputs.first_trained);
  return "input of " + block_name(place - inputs.shared() + inputs.passing() + 1);
}

}  // namespace

std::string array_name(const PlacementPlan& placement, const ModelLayout& layout, Pool pool, int64_t array) {
  const auto block_name = [&](int64_t block) { return layout.blocks[static_cast<size_t>(block)].name; };
  const auto unit_name = [&](int64_t unit) {
    return layout.name(layout.units(placement.head_segments() > 0)[static_cast<size_t>(unit)]);
  };
  switch (pool) {
    case Pool::kWeights:
      return "weights of " + unit_name(array);
    case Pool::kGradients:
      return "gradient of " + unit_name(array);
    case Pool::kActivations:
      return input_name(placement, array / placement.group, block_name);
    case Pool::kWeightShards:
      return "this rank's shard of the weights of " + unit_name(array);
    case Pool::kGradientShards:
      return "this rank's shard of the gradient of " + unit_name(array);
    case Pool::kOptimizer:
      break;
  }
  const std::vector<int64_t>& first = placement.first_tile;
  int64_t block = 0;
  while (first[static_cast<size_t>(block) + 1] <= array) ++block;
  return fmt::format("optimizer state of {}, tile {}", block_name(block),
                     array - first[static_cast<size_t>(block)]);
}

}  // namespace lm
