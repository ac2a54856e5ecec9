// Where the compute thread is in a step's list of operations, for the thread that watches over it
// (train/watchdog.h). The compute thread writes, any thread reads.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "schedule/schedule.h"

namespace lm {

class StepPulse {
 public:
  struct Beat {
    uint64_t count = 0;           // operations begun so far
    int64_t step = 0;             // 0: before the first
    std::optional<Operation> at;  // nothing: no list is being walked
    bool watched = false;         // from the first operation on, but for work that may take any time
  };

  void begin_step(int64_t step) {
    const std::lock_guard lock(mutex_);
    beat_.step = step;
  }
  void begin(const Operation& operation) {
    const std::lock_guard lock(mutex_);
    beat_.at = operation;
    beat_.watched = true;
    ++beat_.count;
  }
  void end_list() {
    const std::lock_guard lock(mutex_);
    beat_.at.reset();
    ++beat_.count;
  }
  // Between steps: whether somebody is to watch.
  void set_watched(bool watched) {
    const std::lock_guard lock(mutex_);
    beat_.watched = watched;
    ++beat_.count;
  }
  Beat latest() const {
    const std::lock_guard lock(mutex_);
    return beat_;
  }

 private:
  mutable std::mutex mutex_;
  Beat beat_;
};

// While work between steps is done that may take any time: a save.
class Unwatched {
 public:
  explicit Unwatched(StepPulse& pulse) : pulse_(pulse) { pulse_.set_watched(false); }
  ~Unwatched() { pulse_.set_watched(true); }
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;

 private:
  StepPulse& pulse_;
};

// While a list is walked; of no pulse it does nothing.
class WalkedList {
 public:
  explicit WalkedList(StepPulse* pulse) : pulse_(pulse) {}
  ~WalkedList() {
    if (pulse_ != nullptr) pulse_->end_list();
  }
  WalkedList(const WalkedList&) = delete;
  WalkedList& operator=(const WalkedList&) = delete;
  void begin(const Operation& operation) const {
    if (pulse_ != nullptr) pulse_->begin(operation);
  }

 private:
  StepPulse* const pulse_;
};

}  // namespace lm
