#include "plan/homes.h"

#include <algorithm>

#include "base/bytes.h"

namespace lm {

const char* state_class_name(StateClass state) {
  constexpr const char* kNames[] = {"weights",      "frozen weights", "gradients",  "master",
                                    "first moment", "second moment",  "activations"};
  return kNames[static_cast<size_t>(state)];
}

const char* home_name(Home home) {
  constexpr const char* kNames[] = {"device", "host", "nvme"};
  return kNames[static_cast<size_t>(home)];
}

Home PoolPlan::home_of(size_t array) const {
  return static_cast<int64_t>(array) < kept_in_host ? Home::kHost : home;
}

int64_t PoolPlan::streamed_bytes(Home at) const {
  int64_t sum = 0;
  for (size_t a = 0; a < bytes.size(); ++a)
    sum += streamed[a] != 0 && home_of(a) == at ? round_up(bytes[a], kSlotAlignment) : 0;
  return sum;
}

int64_t PoolPlan::streamed_bytes() const {
  return streamed_bytes(Home::kHost) + streamed_bytes(Home::kNvme);
}

int64_t PlacementPlan::head_segments() const {
  for (const Pool which : {Pool::kWeights, Pool::kGradients}) {
    const PoolPlan& arrays = pool(which);
    const int64_t segments = arrays.slots > 0 ? std::ssize(arrays.streamed) - blocks : 0;
    if (segments > 0 && std::count(arrays.streamed.end() - segments, arrays.streamed.end(), 1) > 0)
      return segments;
  }
  return 0;
}

ScheduleShape PlacementPlan::schedule(const ModelSpec& spec, bool recompute, Clip clip) const {
  return {.layers = spec.layers,
          .micro_batches = 1,
          .tied = spec.tied,
          .recompute = recompute,
          .clip = clip,
          .group = group,
          .tiles = update_tiles(),
          .segments = head_segments(),
          .segment_tiles = segment_tiles};
}

TransferShape PlacementPlan::transfers(int64_t layers) const {
  TransferShape shape;
  for (int p = 0; p < kPools; ++p) {
    const auto which = static_cast<Pool>(p);
    if (pool(which).slots > 0) shape.pool(which) = {moved(which), pool(which).slots};
  }
  shape.first_tile = first_tile;
  shape.tiles = update_tiles();
  shape.segment_tiles = segment_tiles;
  shape.layers = layers;
  shape.group = group;
  shape.frozen_weights = frozen_weights;
  return shape;
}

TimelineShape PlacementPlan::timeline(int64_t layers) const {
  TimelineShape shape{
      .transfers = transfers(layers), .arrays = {}, .gpu = device == DeviceType::kCuda, .host_updates = {}};
  for (int p = 0; p < kPools; ++p) {
    const PoolPlan& plan = pool(static_cast<Pool>(p));
    for (size_t a = 0; a < plan.bytes.size(); ++a)
      shape.arrays[static_cast<size_t>(p)].push_back({plan.bytes[a], plan.home_of(a) == Home::kNvme});
  }
  const PoolPlan& tiles = pool(Pool::kOptimizer);
  for (size_t a = 0; update_on_host && a < tiles.bytes.size(); ++a) {
    const int64_t elements = tiles.bytes[a] / state_bytes;
    shape.host_updates.push_back({tiles.streamed[a] != 0, elements * update_brings, elements * update_sends});
  }
  return shape;
}

std::vector<char> PlacementPlan::moved(Pool which) const {
  const PoolPlan& plan = pool(which);
  std::vector<char> out = plan.streamed;
  for (size_t a = 0; a < out.size(); ++a) {
    if (which == Pool::kOptimizer && update_on_host && plan.home_of(a) == Home::kHost) out[a] = 0;
  }
  return out;
}

bool PlacementPlan::on_host(const Operation& operation) const {
  if (operation.kind != OperationKind::kUpdate || !update_on_host) return false;
  const int64_t tile = first_tile[static_cast<size_t>(operation.block)] + operation.micro;
  // A block in which nothing is trained has an update, and no tile.
  return tile < first_tile[static_cast<size_t>(operation.block) + 1] &&
         pool(Pool::kOptimizer).streamed[static_cast<size_t>(tile)] != 0;
}

std::vector<int64_t> PlacementPlan::update_tiles() const {
  std::vector<int64_t> tiles;
  const std::vector<char>& streamed = pool(Pool::kOptimizer).streamed;
  for (size_t b = 0; b + 1 < first_tile.size(); ++b) {
    const auto begin = streamed.begin() + first_tile[b], end = streamed.begin() + first_tile[b + 1];
    tiles.push_back(std::any_of(begin, end, [](char s) { return s != 0; }) ? end - begin : 0);
  }
  const auto none = [](int64_t n) { return n == 0; };
  if (std::all_of(tiles.begin(), tiles.end(), none)) tiles.clear();
  return tiles;
}

bool PlacementPlan::on_disk() const {
  return std::any_of(pools.begin(), pools.end(),
                     [](const PoolPlan& pool) { return pool.streamed_bytes(Home::kNvme) > 0; });
}

}  // namespace lm
