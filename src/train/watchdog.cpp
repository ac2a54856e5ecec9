#include "train/watchdog.h"

#include <fmt/format.h>
#include <algorithm>
#include <chrono>
#include <fstream>
#include <utility>

namespace lm {
namespace {

constexpr size_t kRemembered = 63;  // steps; enough for a median that is robust to outliers
constexpr int kLooks = 64;          // polls within the minimum limit

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
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

Watchdog::Watchdog(WatchdogSetup setup) : setup_(std::move(setup)) {
  thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  leave_.notify_one();
  thread_.join();
}

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

bool Watchdog::moves() {
  const int64_t bytes = setup_.moved_bytes ? setup_.moved_bytes() : 0;
  const StepPulse::Beat beat = setup_.pulse.latest();
  const bool moved = std::exchange(seen_, beat.count) != beat.count;
  const bool transferred = std::exchange(bytes_, bytes) != bytes;
  const std::optional<DeviceStand> at = device();
  const bool called = at && std::exchange(calls_, at->passed) != at->passed;
  const bool waits = setup_.group.waits() || (setup_.gpus != nullptr && setup_.gpus->waits());
  return moved || transferred || called || !beat.at || waits;
}

std::optional<DeviceStand> Watchdog::device() const {
  return setup_.gpus != nullptr ? setup_.gpus->device() : std::nullopt;
}

void Watchdog::watch() {
  const std::chrono::duration<double> look(std::min(setup_.least / kLooks, 1.0));
  double still = 0;
  std::unique_lock lock(mutex_);
  while (!leave_.wait_for(lock, look, [this] { return leaving_; })) {
    lock.unlock();
    still = moves() ? 0 : still + look.count();
    const StepPulse::Beat beat = setup_.pulse.latest();
    if (beat.at && still >= limit()) {
      const std::optional<DeviceStand> at = device();
      if (!at || !at->inside || still >= kInCall * limit()) return setup_.give_up(stuck(beat, at, still));
    }
    lock.lock();
  }
}

Error Watchdog::stuck(const StepPulse::Beat& beat, const std::optional<DeviceStand>& device,
                      double seconds) const {
  const int rank = setup_.group.rank();
  return Error(
      Exit::kNoProgress,
      {.area = "HANG-09",
       .what = fmt::format("rank {} on {} has made no progress for {:.1f} s: it is stuck in \"{}\" of "
                           "step {}, with {:.1f} s allowed{}",
                           rank, setup_.host, seconds, setup_.name(*beat.at), beat.step, limit(),
                           device ? "; its GPU " + device->where : ""),
       .place = fmt::format("rank {}", rank),
       .next = "see whether its GPU, its disk or a debugger holds that process (its stack: gdb -p, or "
               "/proc/PID/stack); then start the same command again"});
}

}  // namespace lm
