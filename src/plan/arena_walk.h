// An arena of sizes alone: what base/arena.h would hand out, without memory. Walking a step's allocations
// through it gives the bytes that the arena must have. A value; one thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/arena.h"
#include "base/bytes.h"

namespace lm {

class ArenaWalk {
 public:
  void allocate(int64_t bytes) {
    used_ += round_up(bytes, Arena::kAlignment);
    high_water_ = std::max(high_water_, used_);
  }
  int64_t mark() const { return used_; }
  void rewind(int64_t mark) { used_ = mark; }
  int64_t high_water() const { return high_water_; }

 private:
  int64_t used_ = 0, high_water_ = 0;
};

// Returns a walk to where it was when the frame began.
class ArenaWalkFrame {
 public:
  explicit ArenaWalkFrame(ArenaWalk& walk) : walk_(walk), mark_(walk.mark()) {}
  ~ArenaWalkFrame() { walk_.rewind(mark_); }
  ArenaWalkFrame(const ArenaWalkFrame&) = delete;
  ArenaWalkFrame& operator=(const ArenaWalkFrame&) = delete;

 private:
  ArenaWalk& walk_;
  int64_t mark_;
};

}  // namespace lm
