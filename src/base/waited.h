// The time spent waiting for something. The waiter polls, and at most `most` of the time between two polls
// counts, so that time in which the process was stopped (Ctrl-Z, a suspended job, a frozen container) does
// not count as waiting; otherwise this is the clock's time. Used by one thread.
#pragma once

#include <algorithm>
#include <utility>

namespace lm {

class Waited {
 public:
  // Seconds; polls are some tenths of a second apart, on a busy machine more.
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
