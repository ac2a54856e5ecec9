// A thread that ends a rank whose compute thread makes no progress through the operations of its steps: a
// driver or a call that never returns. It calls neither MPI nor NCCL, so that it works when these hang. The
// limit is ten times the median step, at least a minute: no single operation takes as long as a step.
//
// Progress is the next operation, bytes read from or written to disks, or the next collective that a GPU
// enters or completes (comm/collective_trace.h). A rank that waits for others, or whose GPU does, is not the
// one that hangs; if a GPU is in a collective that all ranks have entered, the collective hangs. Between
// lists (loading, preparing data, saving, writing to a console) it is not watched: the group's own timeout
// covers that. Time is counted in elapsed polling intervals, so that time in which the process was stopped
// does not count.
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
#include "train/progress_counter.h"

namespace lm {

struct WatchdogSetup {
  const ProgressCounter& progress_counter;  // borrowed
  const Group& group;                       // borrowed
  const Group* gpus = nullptr;              // the same ranks, if collectives are enqueued; borrowed
  double least = 60;                        // seconds
  double step_seconds = 0;                  // as planned, until steps are measured
  std::string host = {};                    // of this rank, for the message
  std::function<std::string(const Operation&)> name = {};  // for the message; called by this thread
  std::function<int64_t()> moved_bytes = {};               // disk bytes so far; called by this thread
  std::function<void(const Error&)> give_up = {};          // called by this thread, once, with an Error(41)
};

// Disk bytes of this process so far, as the kernel counts them; 0 if it does not.
int64_t disk_bytes_moved();

class Watchdog {
 public:
  explicit Watchdog(WatchdogSetup setup);

  static constexpr double kLeast = 60;  // seconds
  static constexpr double kSteps = 10;
  // Factor of the limit for a collective that all GPUs have entered: a rank that stopped after entering is
  // detected earlier by its missing heartbeat.
  static constexpr double kInCollective = 1.5;

  // Called by the compute thread after a step.
  void step_done(double seconds);
  // Seconds without progress after which the rank is ended. Any thread.
  double limit() const;

 private:
  // Polls; returns whether to continue.
  bool look();

  const WatchdogSetup setup_;
  mutable std::mutex mutex_;
  std::vector<double> seconds_;  // of the last steps; guarded by the mutex
  StallTimer stall_;             // the thread's own
  Periodic thread_;
};

}  // namespace lm
