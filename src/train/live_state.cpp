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
      if (weights_.in_shards(entry.unit)) {
        read_shard(entry, take);
        continue;
      }
      staging_.read(weights(entry.unit, entry.first, entry.first + entry.elements), entry.bytes(),
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
  const StateEntry& unit = entries.front();  // all entries are of its shard
  const int64_t from = std::max(unit.shard.first, range.first), to = std::min(unit.shard.end(), range.end());
  if (from >= to) return;
  const OpenTile open = optimizer_->open(block, tile);
  const std::byte* const weights_here = open.fresh() ? weights(unit.unit, from, to) : nullptr;
  for (const StateEntry& entry : entries) {
    const int64_t begin = open.bytes(entry.stream, entry.shard.first, from);
    open.read(entry.stream, from, to, weights_here, staging_,
              [&](int64_t offset, std::span<const std::byte> bytes) { take(entry, begin + offset, bytes); });
  }
}

// Reads only this rank's shard: other ranks read theirs.
void LiveState::read_shard(const StateEntry& entry, const Take& take) {
  const Unit& unit = weights_.units()[static_cast<size_t>(entry.unit)];
  const int64_t begin = (entry.first - unit.first) * static_cast<int64_t>(dtype_size(weights_.dtype()));
  shard_.resize(static_cast<size_t>(std::min(entry.bytes(), kReadAtOnce)));
  for (int64_t offset = 0; offset < entry.bytes(); offset += std::ssize(shard_)) {
    const auto bytes = static_cast<size_t>(std::min<int64_t>(entry.bytes() - offset, std::ssize(shard_)));
    weights_.read(entry.unit, begin + offset, std::span(shard_).first(bytes));
    take(entry, offset, std::span<const std::byte>(shard_).first(bytes));
  }
}

const std::byte* LiveState::weights(int64_t unit, int64_t first, int64_t end) {
  const auto size = static_cast<int64_t>(dtype_size(weights_.dtype()));
  const int64_t offset = (first - weights_.units()[static_cast<size_t>(unit)].first) * size;
  if (weights_.in_shards(unit)) {
    shard_.resize(static_cast<size_t>((end - first) * size));
    weights_.read(unit, offset, shard_);
    return shard_.data();
  }
  if (!open_ || open_->unit() != unit) {
    open_.reset();
    open_.emplace(weights_.open(unit, false));
  }
  return open_->trainable() + offset;
}

}  // namespace lm
