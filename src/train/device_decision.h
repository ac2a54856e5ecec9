// A step's check on the GPU: loss, norm, clip factor and whether the step is skipped are decided in stream
// order, where the updates behind them read them, and the host reads them later. So the host never waits for
// the step that it enqueues, and the GPU always has work. The results of kInFlight steps have a place in host
// memory. One thread, which issues the stream's work.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "base/arena.h"
#include "base/cuda.h"
#include "model/head_loss.h"
#include "optim/gradients.h"

namespace lm {

class DeviceDecision {
 public:
  static constexpr int64_t kInFlight = kDecisionsInFlight;

  // Borrows gradients, all in their own device memory, and `host`: registered memory for kInFlight decisions.
  DeviceDecision(const Gradients& gradients, const Kernels& kernels, StreamView stream,
                 std::span<std::byte> host);

  struct Limits {
    double divisor = 0;  // of the sum of losses
    double loss_scale = 1, max_grad_norm = 1;
  };
  // After the step's last gradient and norm. At most kInFlight are unread. `sums` and `routers`: device
  // memory; null: the model has none.
  void enqueue(const LossSums& sums, const RouterFigures* routers, const Limits& limits);
  // What the updates enqueued next read; device memory.
  const StepDecision* on_device() const { return reinterpret_cast<const StepDecision*>(memory_.data()); }
  // The oldest unread one. Waits only if the GPU has not come to it yet.
  StepDecision read();
  int64_t unread() const { return enqueued_ - read_; }

 private:
  const Gradients& gradients_;
  const Kernels& kernels_;
  StreamView stream_;
  int64_t blocks_, arrays_ = 0;
  Memory memory_;  // the decision, each block's first granule and square, and where the gradients are
  int64_t squares_at_ = 0, arrays_at_ = 0, starts_at_ = 0;  // in it
  StepDecision* host_;
  std::vector<Event> arrived_;  // of each place
  int64_t enqueued_ = 0, read_ = 0;
};

}  // namespace lm
