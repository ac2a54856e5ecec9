// What the host sends to the device in a step: token ids, row numbers. Copies go through host memory that is
// registered with the device and is not used again before the stream has come past them, so that nothing
// waits for them. Where steps overlap, one uses one half of it and the next the other. One rank's compute
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/cuda.h"

namespace lm {

class Uploads {
 public:
  // `memory` is borrowed: of `parts`, 1 or 2 where steps overlap, each has room for all uploads between two
  // rewinds, which are rounded up to kAlignment. On the CPU, where copies are complete at once, empty.
  explicit Uploads(std::span<std::byte> memory = {}, int64_t parts = 1) : memory_(memory), parts_(parts) {}

  static constexpr int64_t kAlignment = 64;

  // Copies to device memory in stream order; `from` may be changed as soon as this returns. Throws Error(70)
  // when the memory is used up: the plan was wrong.
  void send(void* to, const void* from, int64_t bytes, StreamView stream);
  // What was sent before the last rewind has arrived, with one part what was sent before this one.
  void rewind() { used_ = 0, part_ = (part_ + 1) % parts_; }

 private:
  std::span<std::byte> memory_;
  int64_t parts_;
  int64_t part_ = 0, used_ = 0;  // in use, and bytes of it
};

}  // namespace lm
