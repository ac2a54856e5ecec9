// Progress counter of the compute thread in a step's list of operations, for the watchdog thread
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
    std::optional<Operation> at;  // nullopt: no list is being executed
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

// Scope in which a list is executed; a no-op without a progress counter.
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
