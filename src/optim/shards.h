// Shards of a unit's flat array in bytes, as comm::Group takes them. Pure.
#pragma once

#include <vector>

#include "comm/group.h"
#include "spec/block_layout.h"

namespace lm {

inline std::vector<ByteRange> bytes_of(const std::vector<Shard>& shards, const Unit& unit, int64_t size) {
  std::vector<ByteRange> out;
  for (const Shard& shard : shards) out.push_back({(shard.first - unit.first) * size, shard.elements * size});
  return out;
}
// Those of a group of ranks, for elements of `size` bytes; relative to the unit's first.
inline std::vector<ByteRange> shard_bytes(const Unit& unit, const Sharding& sharding, int64_t size) {
  return bytes_of(shards_of_unit(unit, sharding), unit, size);
}
// The part of each rank, which adds it up.
inline std::vector<ByteRange> part_bytes(const Unit& unit, const Sharding& sharding, int64_t size) {
  return bytes_of(parts_of_unit(unit, sharding), unit, size);
}

}  // namespace lm
