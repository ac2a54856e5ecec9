// Where bytes of a swap file lie whose own place has refused a write: as a disk's table of bad sectors, but
// of ranges. Pure; one thread, the queue's I/O thread.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "offload/io_engine.h"

namespace lm {

class Relocations {
 public:
  // The place of the longest run from that offset on, at most `bytes`, that lies in one piece.
  ExtentPiece find(int file, int64_t offset, int64_t bytes) const;
  // From now on those bytes lie at `to`, which has as many.
  void add(int file, int64_t offset, const ExtentPiece& to);

 private:
  using Place = std::pair<int, int64_t>;  // file, offset
  std::map<Place, ExtentPiece> moved_;    // by the place of their own; ranges do not overlap
};

}  // namespace lm
