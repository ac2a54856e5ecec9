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
  };

  void begin_step(int64_t step) {
    const std::lock_guard lock(mutex_);
    beat_.step = step;
  }
  void begin(const Operation& operation) {
    const std::lock_guard lock(mutex_);
    beat_.at = operation;
    ++beat_.count;
  }
  void end_list() {
    const std::lock_guard lock(mutex_);
    beat_.at.reset();
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
