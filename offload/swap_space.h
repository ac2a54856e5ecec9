// Scratch space on disks for state that does not fit in memory: one anonymous file per path, preallocated
// before the first step, so that a full disk is met at the start and nothing is left behind however the
// process ends. Space is handed out once, as extents, and striped over the paths by their bandwidth. Built by
// the rank's compute thread; immutable once its extents are handed out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "offload/io_engine.h"

namespace lm {

struct SwapPath {
  std::string directory;
  double weight = 1;  // relative bandwidth; decides the path's share of every extent
};

// Consecutive bytes of an extent that lie in one file.
struct ExtentPiece {
  int file = 0;
  int64_t offset = 0;
  int64_t bytes = 0;  // multiple of the space's alignment
};

// Space for one array. Pieces in order make up the array.
struct Extent {
  std::vector<ExtentPiece> pieces;
  int64_t bytes = 0;  // multiple of the space's alignment
};

class SwapSpace {
 public:
  // Room for `bytes` in all. Throws Error(20) with path, need and free bytes when a disk is too full, Error(21)
  // when a path cannot hold such a file, Error(12) when it is missing or not writable.
  SwapSpace(const std::vector<SwapPath>& paths, int64_t bytes);
  ~SwapSpace();
  SwapSpace(const SwapSpace&) = delete;
  SwapSpace& operator=(const SwapSpace&) = delete;

  // `bytes` is rounded up to the alignment. Throws Error(70) when more is asked than was planned.
  Extent allocate(int64_t bytes);

  // Offsets, lengths and memory addresses of all transfers are multiples of this (at least 4096).
  int64_t alignment() const;
  const std::vector<IoFile>& files() const;
  // The directory that holds file `index`, for messages.
  const std::string& path(int index) const;
  // Whether file `index` bypasses the page cache; if not, why.
  bool direct(int index, std::string* reason = nullptr) const;

 private:
};

}  // namespace lm
