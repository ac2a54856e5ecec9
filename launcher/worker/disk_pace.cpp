#include "launcher/worker/disk_pace.h"

#include <fmt/format.h>

namespace lm {

std::optional<std::string> DiskPace::see(const DiskStep& step) {
  if (said_ || planned_.bytes == 0 || planned_.disk_seconds <= 0 || steps_++ < 0) return std::nullopt;
  sum_.seconds += step.seconds;
  sum_.disk_seconds += step.disk_seconds;
  sum_.wait_seconds += step.wait_seconds;
  sum_.bytes += step.bytes;
  if (steps_ < kWindow) return std::nullopt;
  const DiskStep window = sum_;
  sum_ = {};
  steps_ = 0;
  const double times = window.seconds / kWindow / planned_.seconds;
  if (times < kLonger || window.wait_seconds < kWaits * window.seconds || window.disk_seconds <= 0)
    return std::nullopt;
  const auto rate = [](const DiskStep& of) { return static_cast<double>(of.bytes) / of.disk_seconds / 1e9; };
  if (rate(window) >= rate(planned_)) return std::nullopt;
  said_ = true;
  return fmt::format(
      "disks move {:.2f} GB/s, and the plan was made for {:.2f}: a step takes {:.1f} times as long as "
      "planned "
      "(check what else uses them, or offload less state to them: offload.*)",
      rate(window), rate(planned_), times);
}

}  // namespace lm
