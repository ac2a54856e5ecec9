// The update by the CPU of state in host memory, in a run on a GPU: a tile's gradient and weights are copied
// to host memory, the CPU kernel updates them and the state in place, and the new weights are copied back.
// The state itself never crosses the link. Same formula and order as on the GPU, hence the same bits.
//
// A block's tiles rotate through a few staging slots, so that copies overlap with the kernel on both sides.
// The compute thread calls this and does the CPU's work; the GPU executes earlier enqueued work meanwhile.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/cuda.h"
#include "base/device_clock.h"
#include "base/dtype.h"

namespace lm {

class HostUpdate {
 public:
  static constexpr int64_t kSlots = 3;  // one being copied in, one being updated, one being copied out
  // `staging` is borrowed pinned host memory for kSlots tiles, each with its gradients and weights; `compute`
  // is the stream that writes gradients and weights. `clock` (may be null) records copies, and compute's wait
  // for the last of them.
  HostUpdate(StreamView compute, std::span<std::byte> staging, DType gradient_dtype, DType weight_dtype,
             DeviceClock* clock = nullptr);
  ~HostUpdate();  // nothing is in flight afterwards

  // A range of a block's elements on the device.
  struct Range {
    const std::byte* gradients = nullptr;
    std::byte* weights = nullptr;
    int64_t elements = 0;
  };
  // Sets the ranges that next() returns in order. With `ready` gradients and weights are complete on the
  // device; else copies wait for compute's work so far.
  void begin(std::vector<Range> ranges, bool ready);
  // Cancels the ranges that next() has not returned yet.
  void abandon();
  // The same elements in host memory; waits for them.
  Range next();
  // Copies the weights of next()'s range back: compute's work enqueued after the last of them sees the new
  // ones.
  void send();

 private:
  struct Slot {
    explicit Slot(DeviceType device) : arrived(device), left(device) {}
    std::byte* gradients = nullptr;
    std::byte* weights = nullptr;
    Event arrived, left;
  };
  void stage_ahead();
  void copy(DeviceClock::Kind kind, void* to, const void* from, int64_t bytes, StreamView way);

  StreamView compute_;
  DeviceClock* clock_;
  Stream down_, up_;
  Event ready_;
  int64_t gradient_size_, weight_size_;
  std::vector<Slot> slots_;
  std::vector<Range> ranges_;
  size_t staged_ = 0, given_ = 0;  // counts of ranges
};

}  // namespace lm
