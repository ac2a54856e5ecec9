// The update of state that lives in host memory beside a GPU, by the CPU: a tile's gradient and weights come
// to host memory, the CPU's kernel works on them and on the state where it lies, and the new weights go back.
// The state itself never crosses the link. Same formula and order as on the GPU, hence the same bits.
//
// A block's tiles take turns in a few staging slots, so that copies run ahead of the kernel and behind it.
// The compute thread calls and does the CPU's work; what it has enqueued for the GPU before runs meanwhile.
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
  static constexpr int64_t kSlots = 3;  // one on its way in, one in work, one on its way out
  // `staging` is borrowed pinned host memory for kSlots tiles, each with its gradients and weights; `compute`
  // is the stream that gradients and weights are made on. `clock` (may be null) is told of copies, and of
  // compute's wait for the last of them.
  HostUpdate(StreamView compute, std::span<std::byte> staging, DType gradient_dtype, DType weight_dtype,
             DeviceClock* clock = nullptr);
  ~HostUpdate();  // nothing is in flight afterwards

  // A run of a block's elements on the device.
  struct Range {
    const std::byte* gradients = nullptr;
    std::byte* weights = nullptr;
    int64_t elements = 0;
  };
  // The ranges that next() will give one after another. With `ready` gradients and weights are complete on
  // the device; else what compute has enqueued so far is waited for.
  void begin(std::vector<Range> ranges, bool ready);
  // What begin() named and next() has not given is not asked for any more.
  void abandon();
  // The same elements in host memory; waits for them.
  Range next();
  // Weights of what next() gave go back: what compute enqueues after the last of them finds the new ones.
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
  size_t staged_ = 0, given_ = 0;  // of the ranges
};

}  // namespace lm
