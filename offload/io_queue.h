// Transfers between memory and swap space, executed by one I/O thread in the background. A transfer is
// complete or it is an error: short results are continued, EINTR and EAGAIN are retried, every result is
// matched with its request. Transfers start in the order of the requests, except that one waits for those in
// its `after`; reads and writes overlap. The queue owns thread and engine; memory and space belong to the
// caller and stay valid until the transfer is done. Any thread may call.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "offload/io_engine.h"
#include "offload/swap_space.h"

namespace lm {

using Ticket = uint64_t;  // of a transfer; 0 is always done

struct IoCounters {
  int64_t read_bytes = 0;  // completed
  int64_t written_bytes = 0;
  int64_t retries = 0;      // continued or repeated requests
  double busy_seconds = 0;  // with at least one transfer in flight
};

// A finished transfer, for traces.
struct IoSpan {
  IoDirection direction = IoDirection::kRead;
  std::string what;
  int64_t start_ns = 0;  // steady clock: submission of its first request
  int64_t end_ns = 0;
  int64_t bytes = 0;
};

// How long an engine may answer EINTR, EAGAIN or "a part of a sector" without progress: `tries` per request,
// each EAGAIN pausing twice as long as the last one, up to `longest_pause`. The default gives up after 1 s.
// A read that fails with EIO is retried `read_errors` times: reading again changes nothing on the disk. A
// failed write is not retried: its effect on the disk is unknown. A disk without any completion for `silence`
// counts as hung; a slow disk completes some request in that time.
struct IoRetry {
  int tries = 30;
  int read_errors = 3;
  std::chrono::microseconds longest_pause{50'000};
  std::chrono::milliseconds silence{60'000};
};

class IoQueue {
 public:
  // `make_engine` runs on the I/O thread (a ring belongs to the thread that made it), again at a restart; the
  // constructor rethrows its errors. Transfers are cut into requests of at most `block` bytes.
  IoQueue(IoFiles& space, std::function<std::unique_ptr<IoEngine>()> make_engine, int64_t block,
          IoRetry retry = {});
  // Waits for the requests in flight, unless they hang; drops errors and transfers not yet started. Call
  // `drain` first if all must be done.
  ~IoQueue();
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;

  // Called on the I/O thread at the end of every transfer; set before the first one.
  void set_span_hook(std::function<void(const IoSpan&)> hook);

  // Moves the first `bytes` of the extent (a multiple of the space's alignment; 0 is done at once). `what`
  // names the state for messages ("optimizer state of layers.3, tile 2"); it is copied.
  Ticket read(const Extent& from, std::byte* to, int64_t bytes, const std::string& what,
              std::span<const Ticket> after = {});
  Ticket write(const Extent& to, const std::byte* from, int64_t bytes, const std::string& what,
               std::span<const Ticket> after = {});

  // Blocks until the transfer is done. Throws the first failure of any transfer, this one's or an earlier
  // one's: Error(20) no space, Error(21) otherwise, naming path, offset, errno and state. After a failure
  // every later call throws it again: nothing is computed from state that may be incomplete. Nothing is in
  // flight any more when it is thrown, so the memory may be freed; except after a hang (hangs).
  void wait(Ticket ticket);
  bool done(Ticket ticket) const;
  // Waits for all transfers requested so far.
  void drain();
  // After a failure: drops all requested transfers, marks their tickets done and makes a new engine. Nothing
  // of the old one is in flight any more; throws its failure if it hangs. No other thread may call.
  void restart();
  // A wait was given up with requests in flight: their memory and files, the space and this queue must stay
  // until the process ends.
  bool hangs() const;

  IoCounters counters() const;
  std::string description() const;  // the engine's

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lm
