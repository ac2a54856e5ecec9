#include "plan/tile_cutter.h"

#include <algorithm>

#include "plan/update_work.h"

namespace lm {

void TileCutter::cut(const Unit& unit) {
  const Shard shard = shard_of(unit, 0, placement_.sharded ? placement_.ranks : 1);
  const int64_t begin = shard.first / kGranule, end = shard.end() / kGranule;
  const bool whole = each_ == 0 || updates_whole(rule_, layout_.blocks[static_cast<size_t>(unit.block)]);
  const int64_t each = whole ? end - begin : each_;
  for (int64_t first = begin; first < end; first += each) {
    placement_.first_granule.push_back(first);
    placement_.granules.push_back(std::min(each, end - first));
    bytes_.push_back(most_bytes(unit, (first - begin) * kGranule, std::min(each, end - first) * kGranule));
  }
}

// Of the tile that begins `offset` elements behind each rank's shard.
int64_t TileCutter::most_bytes(const Unit& unit, int64_t offset, int64_t elements) const {
  const int ranks = placement_.sharded ? placement_.ranks : 1;
  if (streams_.of_elements()) return streams_.bytes({elements});
  const BlockLayout& block = layout_.blocks[static_cast<size_t>(unit.block)];
  int64_t most = 0;
  for (int rank = 0; rank < ranks; ++rank) {
    const Shard shard = shard_of(unit, rank, ranks);
    const int64_t first = std::min(shard.first + offset, shard.end());
    most = std::max(most, streams_.bytes(block.count(first, std::min(first + elements, shard.end()))));
  }
  return most;
}

}  // namespace lm
