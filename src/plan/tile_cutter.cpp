#include "plan/tile_cutter.h"

#include <algorithm>

namespace lm {

void TileCutter::add(int64_t first_granule, int64_t granules, int64_t bytes) {
  placement_.first_granule.push_back(first_granule);
  placement_.granules.push_back(granules);
  bytes_.push_back(bytes);
  longest_granules_ = std::max(longest_granules_, granules);
  longest_bytes_ = std::max(longest_bytes_, bytes);
}

// One tile, also of a shard that is empty: another rank has something in it.
void TileCutter::cut_whole(const Unit& unit) {
  const BlockLayout& block = layout_.blocks[static_cast<size_t>(unit.block)];
  const std::vector<Shard> shards = shards_of_unit(unit, placement_.sharding());
  places_.resize(bytes_.size());
  std::vector<PlaceBytes>& places = places_.emplace_back();
  for (size_t place = 0; place < shards.size(); ++place) {
    const Shard& shard = shards[place];
    if (shard.elements == 0) continue;  // of thousands of ranks most have nothing
    const int64_t bytes = state_tensors_.bytes(block.count(shard.first, shard.end()));
    places.push_back({static_cast<int>(place), bytes});
    longest_granules_ = std::max(longest_granules_, shard.elements / kGranule);
    longest_bytes_ = std::max(longest_bytes_, bytes);
  }
  const Shard& first = shards.front();
  add(first.first / kGranule, first.elements / kGranule,
      std::max<int64_t>(state_tensors_.bytes(block.count(first.first, first.end())), 1));
}

std::vector<std::vector<PlaceBytes>> TileCutter::take_places() {
  if (!places_.empty()) places_.resize(bytes_.size());
  return std::move(places_);
}

void TileCutter::cut(const Unit& unit) {
  if (unit.elements == 0) return;
  if (placement_.sharding().of_whole_tensors(unit)) return cut_whole(unit);
  const Shard shard = shard_of(unit, placement_.sharding(), 0);
  const int64_t begin = shard.first / kGranule, end = shard.end() / kGranule;
  const int64_t each = each_ == 0 ? end - begin : each_;
  int64_t bytes = 0, of = 0;  // bytes of a tile of so many granules
  for (int64_t first = begin; first < end; first += each) {
    const int64_t granules = std::min(each, end - first);
    if (!of_elements_ || granules != of)
      bytes = most_bytes(unit, (first - begin) * kGranule, granules * kGranule), of = granules;
    add(first, granules, bytes);
  }
}

// Of the tile that begins `offset` elements behind each rank's shard.
int64_t TileCutter::most_bytes(const Unit& unit, int64_t offset, int64_t elements) const {
  const Sharding sharding = placement_.sharding();
  if (of_elements_) return state_tensors_.bytes({elements});
  const BlockLayout& block = layout_.blocks[static_cast<size_t>(unit.block)];
  int64_t most = 0;
  for (int place = 0; place < sharding.group; ++place) {
    const Shard shard = shard_of(unit, sharding, place);
    const int64_t first = std::min(shard.first + offset, shard.end());
    most = std::max(most, state_tensors_.bytes(block.count(first, std::min(first + elements, shard.end()))));
  }
  return most;
}

}  // namespace lm
