// A LIFO arena over one allocation: activations and temporaries come from here, sized once by the plan, so
// that after the first step nothing is allocated and addresses repeat. Torch-free; device memory or host
// memory. One rank's compute thread calls it; memory is reused in stream order, so all users of one arena
// must enqueue on one stream.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace lm {

class Arena {
 public:
  // Host memory is mapped with huge pages where possible. Throws Error(30 or 31) when there is no room.
  Arena(DeviceType device, int64_t bytes);
  // For a dry run: unlimited, and returns dummy addresses. Past kEndless bytes all requests get the same
  // address.
  struct Counting {};
  static constexpr int64_t kEndless = int64_t{1} << 60;
  explicit Arena(Counting);
  // Over memory of its caller, which outlives it and begins at a multiple of kAlignment.
  Arena(DeviceType device, std::byte* memory, int64_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  static constexpr int64_t kAlignment = 256;

  // 256-byte aligned, uninitialised. Throws Error(70) past the planned size: the plan is wrong.
  std::byte* allocate(int64_t bytes);
  // Everything allocated after `mark()` is returned by `rewind` to it.
  int64_t mark() const { return used_; }
  void rewind(int64_t mark);
  int64_t high_water() const { return high_water_; }
  void restart_high_water() { high_water_ = used_; }
  int64_t capacity() const { return capacity_; }

 private:
  DeviceType device_;
  std::byte* memory_ = nullptr;
  bool owned_ = true;
  int64_t capacity_ = 0;
  int64_t used_ = 0;
  int64_t high_water_ = 0;
};

// Rewinds an arena to its state at the start of the frame.
class ArenaFrame {
 public:
  explicit ArenaFrame(Arena& arena) : arena_(arena), mark_(arena.mark()) {}
  ~ArenaFrame() { arena_.rewind(mark_); }
  ArenaFrame(const ArenaFrame&) = delete;
  ArenaFrame& operator=(const ArenaFrame&) = delete;

 private:
  Arena& arena_;
  int64_t mark_;
};

// One zeroed block of memory for the life of a rank (weights, state): host memory with huge pages where
// possible, or device memory. Move-only; freed at the end.
class Memory {
 public:
  Memory() = default;
  Memory(DeviceType device, int64_t bytes);
  ~Memory();
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  DeviceType device() const { return device_; }

 private:
  DeviceType device_ = DeviceType::kCpu;
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace lm
