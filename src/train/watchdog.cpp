#include "train/watchdog.h"

#include <fmt/format.h>
#include <algorithm>
#include <chrono>
#include <fstream>
#include <optional>
#include <utility>

#include "base/clock.h"

namespace lm {
namespace {

constexpr size_t kRemembered = 63;  // steps; enough for a median that is robust to outliers
constexpr int kLooks = 64;          // polls within the minimum limit

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double look_seconds(const WatchdogSetup& setup) {
  return std::min(setup.least / kLooks, 1.0);
}

}  // namespace

int64_t disk_bytes_moved() {
  std::ifstream counters("/proc/self/io");
  int64_t total = 0, value = 0;
  for (std::string name; counters >> name >> value;) {
    if (name == "read_bytes:" || name == "write_bytes:") total += value;
  }
  return total;
}

Watchdog::Watchdog(WatchdogSetup setup)
    : setup_(std::move(setup)),
      stall_(monotonic_seconds(), look_seconds(setup_)),
      thread_(std::chrono::duration<double>(look_seconds(setup_)), [this] { return look(); }) {}

void Watchdog::step_done(double seconds) {
  const std::lock_guard lock(mutex_);
  if (seconds_.size() == kRemembered) seconds_.erase(seconds_.begin());
  seconds_.push_back(seconds);
}

double Watchdog::limit() const {
  const std::lock_guard lock(mutex_);
  const double step = seconds_.empty() ? setup_.step_seconds : median(seconds_);
  return std::max(setup_.least, kSteps * step);
}

bool Watchdog::look() {
  const ProgressCounter::Position position = setup_.progress_counter.latest();
  const std::optional<DeviceStand> gpu = setup_.gpus != nullptr ? setup_.gpus->device() : std::nullopt;
  const int64_t bytes = setup_.moved_bytes ? setup_.moved_bytes() : 0;
  const double now = monotonic_seconds();
  if (!position.at || setup_.group.waits() || (setup_.gpus != nullptr && setup_.gpus->waits())) {
    stall_.restart(now);
    return true;
  }
  const uint64_t progress =
      position.count + static_cast<uint64_t>(bytes) + (gpu ? gpu->passed : 0);  // none falls
  const double still = stall_.look(progress, now), allowed = limit();
  if (still < (gpu && gpu->inside ? kInCollective : 1) * allowed) return true;
  const std::string doing = fmt::format("\"{}\" of step {}", setup_.name(*position.at), position.step);
  setup_.give_up(
      no_progress({setup_.group.rank(), setup_.host}, doing, still, allowed, gpu ? gpu->where : ""));
  return false;
}

}  // namespace lm
