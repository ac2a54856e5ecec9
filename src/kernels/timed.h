// A device's kernels with a clock around each call: while a trace is recorded, a span between two events in
// the stream says how long each took, by name, products by their sizes. Otherwise a call costs one comparison
// more. For traced runs on a GPU. A thread has one at a time: the one that issues the stream's work.
#pragma once

#include "base/device_clock.h"
#include "kernels/kernels.h"

namespace lm {

class TimedKernels {
 public:
  // From here on the table's calls on this thread go to `inner`, timed by `clock`; both are borrowed.
  TimedKernels(const Kernels& inner, DeviceClock& clock);
  ~TimedKernels();
  TimedKernels(const TimedKernels&) = delete;
  TimedKernels& operator=(const TimedKernels&) = delete;
  const Kernels& table() const { return table_; }

 private:
  Kernels table_;
};

}  // namespace lm
