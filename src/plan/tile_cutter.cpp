#include "plan/tile_cutter.h"

#include <algorithm>

#include "plan/update_work.h"

namespace lm {

void TileCutter::cut(const Unit& unit) {
  const Shard shard = shard_of(unit, placement_.sharding(), 0);
  const int64_t begin = shard.first / kGranule, end = shard.end() / kGranule;
  const bool whole = each_ == 0 || updates_whole(rule_, layout_.blocks[static_cast<size_t>(unit.block)]);
  const int64_t each = whole ? end - begin : each_;
  int64_t bytes = 0, of = 0;  // bytes of a tile of so many granules
  for (int64_t first = begin; first < end; first += each) {
    const int64_t granules = std::min(each, end - first);
    if (!of_elements_ || granules != of)
      bytes = most_bytes(unit, (first - begin) * kGranule, granules * kGranule), of = granules;
    placement_.first_granule.push_back(first);
    placement_.granules.push_back(granules);
    bytes_.push_back(bytes);
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
