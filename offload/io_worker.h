// The I/O thread's half of the queue: cuts transfers into requests, keeps the engine full, and counts only
// reported results as done. Used by one thread; transfers belong to the queue.
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

  // Used by the I/O thread only.
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
  // The time so far with at least one transfer in flight.
  double busy_seconds() const;
  void add(Transfer* transfer);
  // Hands requests to the engine until it is full or all are started.
  void submit();
  // Blocks until something is done, or the engine is woken; appends the transfers that are now complete.
  // Throws Error at the first failure.
  void wait(std::vector<Transfer*>& complete);
  // Starts nothing more and waits for the requests in flight: no memory is touched afterwards. Never throws.
  void settle() noexcept;

 private:
  struct Slot {
    Transfer* transfer = nullptr;  // null: free
    IoRequest request;             // its remaining part
    ExtentPiece own;               // the place in its transfer; the request's may be a relocation
    int tries = 0;                 // without progress
    int read_errors = 0;
    int moves = 0;     // relocations
    uint32_t use = 0;  // part of the id: a late duplicate is not taken for the slot's next request
  };

  std::deque<Transfer*>& waiting(IoDirection direction) { return waiting_[static_cast<size_t>(direction)]; }
  int64_t& flying(IoDirection direction) { return flying_[static_cast<size_t>(direction)]; }
  void start_request(Transfer* transfer);
  void hand_in(Slot& slot);
  Slot& slot_of(uint64_t id);
  void release(Slot& slot);
  // True when the request is complete; otherwise its rest was submitted again.
  bool progress(Slot& slot, int64_t result);
  void again(Slot& slot, bool pause);
  // Relocates a write that its place refused; false if no spare place is left.
  bool move_elsewhere(Slot& slot, int error);
  Error failure(const Slot& slot, int error, const std::string& detail) const;

  IoFiles& space_;
  std::unique_ptr<IoEngine> engine_;
  const int64_t block_;
  const IoRetry retry_;
  std::vector<Slot> slots_;  // as many as the engine's depth
  std::vector<int> free_;
  std::deque<Transfer*> waiting_[2];  // by direction, in the order of the requests
  int64_t flying_[2] = {0, 0};        // bytes in the engine, by direction
  std::chrono::microseconds pause_{0};
  int64_t retries_ = 0;
  int64_t answers_ = 0;
  uint64_t moved_ = 0;  // relocated writes
  Relocations relocations_;
  std::vector<std::atomic<int>> unanswered_;  // by file
  int64_t under_way_ = 0;                     // transfers started and not complete
  int64_t busy_ns_ = 0;                       // up to busy_since_, or to when the last one was complete
  int64_t busy_since_ = 0;
  bool confused_ = false;  // the engine reported an unknown request: its results are not trusted
  std::vector<IoResult> results_;
};

}  // namespace lm
