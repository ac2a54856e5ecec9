// Shards of a unit's flat array in bytes, as comm::Group takes them. Pure.
#pragma once

#include <vector>

#include "comm/group.h"
#include "spec/block_layout.h"

namespace lm {

// Those of a group of ranks, for elements of `size` bytes; relative to the unit's first.
inline std::vector<ByteRange> shard_bytes(const Unit& unit, const Sharding& sharding, int64_t size) {
  std::vector<ByteRange> out;
  for (const Shard& shard : shards_of_unit(unit, sharding))
    out.push_back({(shard.first - unit.first) * size, shard.elements * size});
  return out;
}
// The part of each rank, which adds it up.
inline std::vector<ByteRange> part_bytes(const Unit& unit, const Sharding& sharding, int64_t size) {
  std::vector<ByteRange> out;
  for (int rank = 0; rank < sharding.ranks; ++rank) {
    const Shard part = part_of(unit, sharding, sharding.part(rank));
    out.push_back({(part.first - unit.first) * size, part.elements * size});
  }
  return out;
}

}  // namespace lm
