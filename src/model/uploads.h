// What the host sends to the device in a step: token ids, row numbers. Copies go through host memory that is
// registered with the device and is not used again before the stream has come past them, so that nothing
// waits for them: a step uses one half of it, the next the other. One rank's compute thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/cuda.h"

namespace lm {

class Uploads {
 public:
  // `memory` is borrowed: twice what all uploads between two rewinds take, each rounded up to kAlignment. On
  // the CPU, where copies are complete at once, empty.
  explicit Uploads(std::span<std::byte> memory = {}) : memory_(memory) {}

  static constexpr int64_t kAlignment = 64;

  // Copies to device memory in stream order; `from` may be changed as soon as this returns. Throws Error(70)
  // when the memory is used up: the plan was wrong.
  void send(void* to, const void* from, int64_t bytes, StreamView stream);
  // What was sent before the last rewind has arrived: its half is free.
  void rewind() { used_ = 0, second_ = !second_; }

 private:
  std::span<std::byte> memory_;
  int64_t used_ = 0;     // of the half
  bool second_ = false;  // half
};

}  // namespace lm
