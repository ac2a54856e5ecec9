// Progress counter of the compute thread in a step's list of operations, for the watchdog thread
// (train/watchdog.h). The compute thread writes, any thread reads.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>

#include "schedule/schedule.h"

namespace lm {

class ProgressCounter {
 public:
  struct Position {
    uint64_t count = 0;           // operations begun so far
    int64_t step = 0;             // 0: before the first
    std::optional<Operation> at;  // nullopt: no list is being executed
  };

  void begin_step(int64_t step) {
    const std::lock_guard lock(mutex_);
    position_.step = step;
  }
  void begin(const Operation& operation) {
    const std::lock_guard lock(mutex_);
    position_.at = operation;
    ++position_.count;
  }
  void end_list() {
    const std::lock_guard lock(mutex_);
    position_.at.reset();
    ++position_.count;
  }
  Position latest() const {
    const std::lock_guard lock(mutex_);
    return position_;
  }

 private:
  mutable std::mutex mutex_;
  Position position_;
};

// Scope in which a list is executed; a no-op without a progress counter.
class WalkedList {
 public:
  explicit WalkedList(ProgressCounter* counter) : progress_counter_(counter) {}
  ~WalkedList() {
    if (progress_counter_ != nullptr) progress_counter_->end_list();
  }
  WalkedList(const WalkedList&) = delete;
  WalkedList& operator=(const WalkedList&) = delete;
  void begin(const Operation& operation) const {
    if (progress_counter_ != nullptr) progress_counter_->begin(operation);
  }

 private:
  ProgressCounter* const progress_counter_;
};

}  // namespace lm
