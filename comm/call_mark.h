// How far a rank's GPU is among the calls of its group: values, of no thread.
#pragma once

#include <cstdint>
#include <string>

namespace lm {

// Calls are counted from 1, alike on all ranks.
struct CallMark {
  uint64_t enqueued = 0, begun = 0, done = 0;
  bool inside() const { return begun > done; }
};

// The same for whoever watches over the rank.
struct DeviceStand {
  uint64_t passed = 0;     // grows with every call that the GPU comes to or has done
  bool inside = false;     // it is in a call
  std::string where = {};  // what it does, in words that follow "its GPU"
};

}  // namespace lm
