// The table of relocated ranges of swap files: where bytes are whose own place refused a write, like a disk's
// table of bad sectors. Pure; one thread, the queue's I/O thread.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "offload/io_engine.h"

namespace lm {

class Relocations {
 public:
  // The place of the longest contiguous run from that offset on, at most `bytes` long.
  ExtentPiece find(int file, int64_t offset, int64_t bytes) const;
  // Maps those bytes to `to`, which has the same length.
  void add(int file, int64_t offset, const ExtentPiece& to);

 private:
  using Place = std::pair<int, int64_t>;  // file, offset
  std::map<Place, ExtentPiece> moved_;    // by their original place; ranges do not overlap
};

}  // namespace lm
