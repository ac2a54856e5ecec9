// Scratch space on disks for state that does not fit in memory: one anonymous file per path, preallocated
// before the first step, so that a full disk is an error at the start and nothing is left behind however the
// process ends. Space is allocated once, as extents, and striped over the paths by their bandwidth. Built by
// the rank's compute thread; afterwards only the queue's I/O thread allocates from the spare room.
#pragma once

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "offload/io_engine.h"

namespace lm {

struct SwapPath {
  std::string directory;
  double weight = 1;  // relative bandwidth; decides the path's share of every extent
  int64_t limit = std::numeric_limits<int64_t>::max();  // bytes; the rest goes to the other paths
};

// Space for one array. Pieces in order make up the array.
struct Extent {
  std::vector<ExtentPiece> pieces;
  int64_t bytes = 0;  // multiple of the space's alignment
};

// Bytes [begin, begin + bytes) of it, both multiples of the space's alignment.
Extent slice(const Extent& extent, int64_t begin, int64_t bytes);

class SwapSpace : public IoFiles {
 public:
  // Room for `bytes` in all. Throws Error(20) with path, need and free bytes when a disk is too full or the
  // limits of all paths together are too small,
  // Error(21) when a path cannot hold such a file, Error(12) when it is missing or not writable.
  // `spare`: bytes that each file has beyond its share, if disk and limit allow it, for relocated writes.
  SwapSpace(const std::vector<SwapPath>& paths, int64_t bytes, int64_t spare = 0);
  ~SwapSpace() override;
  SwapSpace(const SwapSpace&) = delete;
  SwapSpace& operator=(const SwapSpace&) = delete;

  // `bytes` is rounded up to the alignment. Throws Error(70) if more is requested than was planned.
  Extent allocate(int64_t bytes);
  // In another file than the one that failed, else elsewhere in this one.
  std::optional<ExtentPiece> spare(int failed, int64_t bytes) override;

  int64_t alignment() const override;
  const std::vector<IoFile>& files() const override;
  // The directory that holds file `index`.
  const std::string& path(int index) const override;
  // Whether file `index` bypasses the page cache; if not, why.
  bool direct(int index, std::string* reason = nullptr) const;
  // Drops these bytes from the page cache, so that they are read from the disk.
  void drop_cached(const Extent& extent) const;
  // The space that `bytes` occupy: rounded up to the alignment. Plans add up these.
  int64_t padded(int64_t bytes) const;
  int64_t capacity() const { return capacity_; }
  int64_t allocated() const { return allocated_; }

 private:
  struct File {
    std::string directory;
    double share = 0;   // of the whole, in 0..1
    int64_t bytes = 0;  // of the whole
    int64_t used = 0;   // handed out, from the start of the file
    int64_t spare = 0;  // bytes behind them, and how many of these are allocated
    int64_t spare_used = 0;
    std::string refusal;  // why O_DIRECT is not used; empty when it is
  };

  void open_file(const SwapPath& path);
  // Sets every file's bytes and share.
  void share_out(const std::vector<SwapPath>& paths);
  void reserve(int index);
  void reserve_spare(int index, int64_t bytes, int64_t limit);
  void try_direct(int index);
  // Allocates `bytes` of file `index`; there is room.
  void take(int index, int64_t bytes, Extent& extent);
  int64_t room(int index) const;
  // How many bytes the file lags behind its share once `total` bytes are handed out.
  double behind(int index, int64_t total) const;

  std::vector<File> parts_;    // beside files_
  std::vector<IoFile> files_;  // the descriptors are owned
  int64_t alignment_ = 4096;
  int64_t capacity_ = 0;
  int64_t allocated_ = 0;
};

}  // namespace lm
