#include "train/live_state.h"

#include <algorithm>

namespace lm {

void LiveState::read(std::span<const StateEntry> entries, const Take& take) {
  const StateEntry& first = entries.front();
  if (first.unit < 0) {
    const int64_t t = optimizer_->t();
    return take(first, 0, std::as_bytes(std::span(&t, 1)));
  }
  if (first.state == StateClass::kWeights) {
    for (const StateEntry& entry : entries) {
      staging_.read(weights(entry.unit, entry.first), entry.bytes(),
                    [&](int64_t offset, std::span<const std::byte> bytes) { take(entry, offset, bytes); });
    }
    return;
  }
  const int64_t block = weights_.units()[static_cast<size_t>(first.unit)].block;
  for (int64_t tile = 0; tile < optimizer_->tiles(block); ++tile) read_tile(block, tile, entries, take);
}

void LiveState::read_tile(int64_t block, int64_t tile, std::span<const StateEntry> entries,
                          const Take& take) {
  const TileRange range = optimizer_->range(block, tile);
  const StateEntry& unit = entries.front();  // all entries have its elements
  const int64_t from = std::max(unit.first, range.first),
                to = std::min(unit.first + unit.elements, range.end());
  if (from >= to) return;
  const OpenTile open = optimizer_->open(block, tile);
  const std::byte* const weights_here = open.fresh() ? weights(unit.unit, from) : nullptr;
  for (const StateEntry& entry : entries) {
    const int64_t begin = (from - entry.first) * static_cast<int64_t>(dtype_size(entry.dtype));
    open.read(entry.stream, from, to, weights_here, staging_,
              [&](int64_t offset, std::span<const std::byte> bytes) { take(entry, begin + offset, bytes); });
  }
}

const std::byte* LiveState::weights(int64_t unit, int64_t element) {
  if (!open_ || open_->unit() != unit) {
    open_.reset();
    open_.emplace(weights_.open(unit, false));
  }
  const Unit& here = weights_.units()[static_cast<size_t>(unit)];
  return open_->trainable() + (element - here.first) * static_cast<int64_t>(dtype_size(weights_.dtype()));
}

}  // namespace lm
