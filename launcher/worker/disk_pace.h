// Whether the disks are as fast as planned. Their rates were measured in some tenths of a second, perhaps
// days ago: another program, a full cache or a worn disk may slow them, and then every step, during the run.
// Pure; one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lm {

// Measurements of one step: its time, the time in which a disk transfer was in flight, the time in which
// compute waited for transfers, and the bytes that disks read and wrote.
struct DiskStep {
  double seconds = 0, disk_seconds = 0, wait_seconds = 0;
  int64_t bytes = 0;
};

class DiskPace {
 public:
  // `planned`: a step as the cost model estimates it.
  explicit DiskPace(const DiskStep& planned) : planned_(planned) {}

  // Call after each step. Returns a warning once: when kWindow steps took kLonger times the planned time,
  // kWaits of it or more waiting, while disks moved fewer bytes per second than planned.
  std::optional<std::string> see(const DiskStep& step);

  static constexpr int kWindow = 8;
  static constexpr double kLonger = 1.25, kWaits = 0.2;

 private:
  DiskStep planned_, sum_;
  int steps_ = -1;  // the first step fills slots
  bool said_ = false;
};

}  // namespace lm
