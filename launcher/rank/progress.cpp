#include "launcher/rank/progress.h"

#include <cstdio>

#include "base/bytes.h"
#include "base/log.h"
#include "launcher/rank/progress_line.h"

namespace lm {

void Progress::show(const StepRow& row) {
  seconds_ += row.step_ms / 1e3;
  const double left = seconds_ / static_cast<double>(row.step) * static_cast<double>(total_ - row.step);
  show_step({.step = row.step,
             .total = total_,
             .loss = row.loss,
             .grad_norm = row.grad_norm,
             .lr = row.lr,
             .tokens_per_s = row.tokens_per_s,
             .sol_pct = row.sol_pct,
             .seconds_left = left},
            every_);
}

void Progress::finish(const TrainerResult& result) {
  char line[160];
  std::snprintf(line, sizeof line, "%s after %ld steps: %ld tokens in %s, %.0f tokens/s",
                result.stopped ? "stopped on request" : "done", result.steps, result.tokens,
                duration_text(result.seconds).c_str(),
                result.seconds > 0 ? static_cast<double>(result.tokens) / result.seconds : 0.0);
  log_line(line);
}

std::string format_peak(const Plan& plan, int64_t device_bytes) {
  const std::string host =
      format_bytes(peak_resident_bytes()) + " (planned " + format_bytes(plan.peak.host) + ")";
  if (device_bytes == 0) return host;
  return host + ", of the GPU's " + format_bytes(device_bytes) + " (planned " +
         format_bytes(plan.peak.device) + ")";
}

}  // namespace lm
