// A thread that gives up a rank whose compute thread makes no headway through the operations of its steps: a
// driver or a call that never returns. It calls neither MPI nor NCCL, so that it works when these are stuck.
// The limit is ten times the median step, at least a minute: no single operation takes as long as a step.
//
// Headway is the next operation, bytes that the process moves from or to its disks, or the next call that a
// GPU comes to or has done (comm/call_marks.h). A rank that waits for others, or whose GPU does, is not the
// one that is stuck; where a GPU is in a call to which all have come, the call is. Between lists (it loads,
// prepares data, saves, writes to a console) it is not watched: for that the group's own patience is there.
// Time is counted in looks that were waited out, so that a process that was stopped finds its limit unspent.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/group.h"
#include "train/step_pulse.h"

namespace lm {

struct WatchdogSetup {
  const StepPulse& pulse;       // borrowed
  const Group& group;           // borrowed
  const Group* gpus = nullptr;  // the same ranks, where calls are enqueued; borrowed
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
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

  static constexpr double kLeast = 60;  // seconds
  static constexpr double kSteps = 10;
  // Of the limit, for a call of GPUs to which all have come: a rank that is stopped since then is found by
  // its silence before.
  static constexpr double kInCall = 1.5;

  // By the compute thread, after a step.
  void step_done(double seconds);
  // Seconds without headway after which the rank is given up. Any thread.
  double limit() const;

 private:
  void watch();
  // Whether the rank has made headway, or need not, since the last look.
  bool moves();
  std::optional<DeviceStand> device() const;
  Error stuck(const StepPulse::Beat& beat, const std::optional<DeviceStand>& device, double seconds) const;

  const WatchdogSetup setup_;
  mutable std::mutex mutex_;
  std::condition_variable leave_;
  bool leaving_ = false;         // guarded by the mutex
  std::vector<double> seconds_;  // of the last steps; guarded by the mutex

  // The thread's own.
  uint64_t seen_ = 0;
  int64_t bytes_ = 0;
  uint64_t calls_ = 0;
  std::thread thread_;
};

}  // namespace lm
