// How long something has been waited for. Who waits looks again and again, and of the time between two looks
// no more than `most` counts. So a process that was stopped (Ctrl-Z, a suspended job, a frozen container)
// finds its patience unspent; where nothing stops it, this is the clock's time. One thread's.
#pragma once

#include <algorithm>
#include <utility>

namespace lm {

class Waited {
 public:
  // Seconds; looks are some tenths of a second apart, and on a busy machine more.
  static constexpr double kMost = 1;

  Waited() = default;
  // From `now` on, in seconds of the monotonic clock.
  explicit Waited(double now, double most = kMost) : looked_(now), most_(most) {}
  // Seconds until `now`.
  double look(double now) {
    seconds_ += std::min(now - std::exchange(looked_, now), most_);
    return seconds_;
  }

 private:
  double looked_ = 0, most_ = kMost;
  double seconds_ = 0;
};

}  // namespace lm
