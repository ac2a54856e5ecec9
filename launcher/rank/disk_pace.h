// Whether the disks keep up with what the plan knows of them. It was measured in some tenths of a second,
// perhaps days ago: another program, a full cache or a worn disk may make it slower while the run lasts, and
// then every step. Pure; one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lm {

// Of a step: its time, that in which some transfer of a disk was under way, that in which compute waited for
// transfers, and the bytes that disks read and wrote.
struct DiskStep {
  double seconds = 0, disk_seconds = 0, wait_seconds = 0;
  int64_t bytes = 0;
};

class DiskPace {
 public:
  // `planned`: a step as the plan forecasts it.
  explicit DiskPace(const DiskStep& planned) : planned_(planned) {}

  // After each step. What is wrong, once: when kWindow steps have taken kLonger of the planned time, kWaits
  // of it or more waiting, while disks moved fewer bytes a second than planned.
  std::optional<std::string> see(const DiskStep& step);

  static constexpr int kWindow = 8;
  static constexpr double kLonger = 1.25, kWaits = 0.2;

 private:
  DiskStep planned_, sum_;
  int steps_ = -1;  // the first one fills slots
  bool said_ = false;
};

}  // namespace lm
