// Cuts optimizer state into the tiles of a placement. Inside src/plan.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace lm {

class TileCutter {
 public:
  // `each`: granules of a tile; 0: a unit is one tile, as is one whose tensors the rule updates whole. Fills
  // the placement's lists of tiles, which are empty; its sharding is known.
  TileCutter(PlacementPlan& placement, const ModelLayout& layout, const NumericsPlan& numerics, int64_t each)
      : placement_(placement),
        layout_(layout),
        state_tensors_(numerics.state()),
        of_elements_(state_tensors_.of_elements()),
        each_(each) {}

  void begin_block() { placement_.first_tile.push_back(std::ssize(bytes_)); }
  void begin_unit() { placement_.segment_tiles.push_back(std::ssize(bytes_) - placement_.first_tile.back()); }
  void cut(const Unit& unit);
  // Bytes of each tile, on the rank that has most of it; of whole tensors those of the first rank, which has
  // most of all together.
  const std::vector<int64_t>& bytes() const { return bytes_; }
  // Of tiles of whole tensors the bytes of every place that has some; empty: there is none.
  std::vector<std::vector<PlaceBytes>> take_places();
  // Of the longest tile of any rank.
  int64_t longest_bytes() const { return longest_bytes_; }
  int64_t longest_granules() const { return longest_granules_; }

 private:
  void add(int64_t first_granule, int64_t granules, int64_t bytes);
  void cut_whole(const Unit& unit);
  int64_t most_bytes(const Unit& unit, int64_t offset, int64_t elements) const;

  PlacementPlan& placement_;
  const ModelLayout& layout_;
  StateTensors state_tensors_;
  bool of_elements_;  // a tile's bytes follow from its length
  int64_t each_;
  std::vector<int64_t> bytes_;
  std::vector<std::vector<PlaceBytes>> places_;  // up to the last tile that has some
  int64_t longest_bytes_ = 0, longest_granules_ = 0;
};

}  // namespace lm
