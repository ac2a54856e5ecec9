// A thread that gives up a rank whose compute thread makes no headway through the operations of its steps: a
// driver or a call that never returns. It calls neither MPI nor NCCL, so that it works when these are stuck.
// The limit is ten times the median step, at least a minute: no single operation takes as long as a step.
//
// Headway is the next operation, bytes that the process moves from or to its disks, or the next collective
// that a GPU enters or completes (comm/collective_trace.h). A rank that waits for others, or whose GPU does,
// is not the one that is stuck; where a GPU is in a collective that all have entered, that is. Between lists
// (it loads, prepares data, saves, writes to a console) it is not watched: for that the group's own patience
// is there. Time is counted in looks that were waited out, so that a process that was stopped finds its limit
// unspent.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "comm/group.h"
#include "comm/liveness.h"
#include "comm/periodic.h"
#include "train/step_pulse.h"

namespace lm {

struct WatchdogSetup {
  const StepPulse& pulse;       // borrowed
  const Group& group;           // borrowed
  const Group* gpus = nullptr;  // the same ranks, where collectives are enqueued; borrowed
  double least = 60;            // seconds
  double step_seconds = 0;      // as planned, until steps are measured
  std::string host = {};        // of this rank, for the message
  std::function<std::string(const Operation&)> name = {};  // for the message; called by this thread
  std::function<int64_t()> moved_bytes = {};               // from and to disks so far; called by this thread
  std::function<void(const Error&)> give_up = {};          // called by this thread, once, with an Error(41)
};

// That this process has moved so far, as the kernel counts them; 0 where it does not say.
int64_t disk_bytes_moved();

class Watchdog {
 public:
  explicit Watchdog(WatchdogSetup setup);

  static constexpr double kLeast = 60;  // seconds
  static constexpr double kSteps = 10;
  // Of the limit, for a collective that all GPUs have entered: a rank that is stopped since then is found by
  // its silence before.
  static constexpr double kInCollective = 1.5;

  // By the compute thread, after a step.
  void step_done(double seconds);
  // Seconds without headway after which the rank is given up. Any thread.
  double limit() const;

 private:
  // Whether to go on looking.
  bool look();

  const WatchdogSetup setup_;
  mutable std::mutex mutex_;
  std::vector<double> seconds_;  // of the last steps; guarded by the mutex
  StallTimer stall_;             // the thread's own
  Periodic thread_;
};

}  // namespace lm
