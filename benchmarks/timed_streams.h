// Work of known length in the emulator's streams (tests/emulator): a stream sleeps for as long as a GPU or a
// link would take, so that several ranks share this machine's cores and none is in another's way. What
// kernels take here themselves is taken off what their stream sleeps next. Streams are this process's; its
// compute thread calls.
#pragma once

#include <map>

#include "base/cuda.h"
#include "kernels/kernels.h"

namespace lm {

class TimedStreams {
 public:
  // In stream order: so many seconds pass.
  void hold(StreamView stream, double seconds);
  // What is enqueued between the two is counted as here.
  void begin(StreamView stream);
  void end(StreamView stream);
  // In all streams, so far.
  double held() const { return held_; }

 private:
  struct Clock {
    double began = 0;
    double owed = 0;  // seconds: to be slept, less what kernels and oversleeping have taken
  };
  Clock* clock(StreamView stream) { return &clocks_[stream.handle]; }
  std::map<void*, Clock> clocks_;  // each its stream's own thread's
  double held_ = 0;
};

// What a GPU does in a second.
struct TimedRates {
  double gemm_flops = 1, updated_elements = 1;
};

// `real`'s kernels, of which products and updates take as long as these rates say. One table per process; it
// borrows all three.
const Kernels& timed_kernels(const Kernels& real, TimedStreams& streams, const TimedRates& rates);

}  // namespace lm
