// Every rank's shard of a unit's flat array in bytes, as comm::Group takes it. Pure.
#pragma once

#include <vector>

#include "comm/group.h"
#include "spec/block_layout.h"

namespace lm {

// For elements of `size` bytes; relative to the unit's first.
inline std::vector<ByteRange> shard_bytes(const Unit& unit, int ranks, int64_t size) {
  std::vector<ByteRange> out;
  for (int rank = 0; rank < ranks; ++rank) {
    const Shard shard = shard_of(unit, rank, ranks);
    out.push_back({(shard.first - unit.first) * size, shard.elements * size});
  }
  return out;
}

}  // namespace lm
