// The I/O thread's half of the queue: cuts transfers into requests, keeps the engine full, and believes
// nothing but results. Used by one thread; transfers belong to the queue.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "offload/io_engine.h"
#include "offload/io_queue.h"
#include "offload/relocations.h"
#include "offload/swap_space.h"

namespace lm {

struct Transfer {
  // Consecutive bytes of one file; `started` of them have been handed to the engine.
  struct Part {
    int file = 0;
    int64_t offset = 0;
    int64_t bytes = 0;
    std::byte* memory = nullptr;
    int64_t started = 0;
  };

  Ticket ticket = 0;
  IoDirection direction = IoDirection::kRead;
  int64_t bytes = 0;
  std::string what;
  std::vector<Part> parts;

  // The I/O thread's.
  int64_t started = 0, finished = 0;
  int64_t start_ns = 0, end_ns = 0;

  // Guarded by the queue's mutex.
  int waits_for = 0;  // transfers that must be done first
  std::vector<Transfer*> followers;
};

class IoWorker {
 public:
  IoWorker(IoFiles& space, std::unique_ptr<IoEngine> engine, int64_t block, IoRetry retry);

  IoEngine& engine() { return *engine_; }
  int64_t retries() const { return retries_; }
  // Results so far.
  int64_t answers() const { return answers_; }
  // Requests of this file that the engine has not answered. Any thread.
  int unanswered(int file) const { return unanswered_[static_cast<size_t>(file)]; }
  // In which at least one transfer was started and not complete, up to now.
  double busy_seconds() const;
  void add(Transfer* transfer);
  // Hands requests to the engine until it is full or all are started.
  void submit();
  // Blocks until something is done, or the engine is woken; appends the transfers that are now complete.
  // Throws Error at the first failure.
  void wait(std::vector<Transfer*>& complete);
  // Starts nothing more and waits for what the engine has: no memory is touched after it. Never throws.
  void settle() noexcept;

 private:
  struct Slot {
    Transfer* transfer = nullptr;  // null: free
    IoRequest request;             // what is still to be moved of it
    ExtentPiece own;               // the place that its transfer names, which may not be the request's
    int tries = 0;                 // without progress
    int read_errors = 0;
    int moves = 0;     // to another place
    uint32_t use = 0;  // part of the id: a late duplicate is not taken for the slot's next request
  };

  std::deque<Transfer*>& waiting(IoDirection direction) { return waiting_[static_cast<size_t>(direction)]; }
  int64_t& flying(IoDirection direction) { return flying_[static_cast<size_t>(direction)]; }
  void start_request(Transfer* transfer);
  void hand_in(Slot& slot);
  Slot& slot_of(uint64_t id);
  void release(Slot& slot);
  // True when the request's last byte has moved; otherwise it was handed in again.
  bool progress(Slot& slot, int64_t result);
  void again(Slot& slot, bool pause);
  // Gives what its place has refused another one; false where there is none.
  bool move_elsewhere(Slot& slot, int error);
  Error failure(const Slot& slot, int error, const std::string& detail) const;

  IoFiles& space_;
  std::unique_ptr<IoEngine> engine_;
  const int64_t block_;
  const IoRetry retry_;
  std::vector<Slot> slots_;  // as many as the engine's depth
  std::vector<int> free_;
  std::deque<Transfer*> waiting_[2];  // by direction, in the order asked for
  int64_t flying_[2] = {0, 0};        // bytes in the engine, by direction
  std::chrono::microseconds pause_{0};
  int64_t retries_ = 0;
  int64_t answers_ = 0;
  uint64_t moved_ = 0;  // writes that went elsewhere
  Relocations relocations_;
  std::vector<std::atomic<int>> unanswered_;  // by file
  int64_t under_way_ = 0;                     // transfers started and not complete
  int64_t busy_ns_ = 0;                       // up to busy_since_, or to when the last one was complete
  int64_t busy_since_ = 0;
  bool confused_ = false;  // the engine reported what it was not asked for: its results mean nothing
  std::vector<IoResult> results_;
};

}  // namespace lm
