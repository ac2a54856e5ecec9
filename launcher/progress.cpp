#include "launcher/progress.h"

#include <unistd.h>

#include <cstdio>

#include "base/bytes.h"
#include "base/log.h"

namespace lm {
namespace {

std::string duration(double seconds) {
  const auto s = static_cast<long>(seconds);
  char text[32];
  if (s >= 3600) {
    std::snprintf(text, sizeof text, "%ld:%02ld:%02ld", s / 3600, s / 60 % 60, s % 60);
  } else {
    std::snprintf(text, sizeof text, "%ld:%02ld", s / 60, s % 60);
  }
  return text;
}

}  // namespace

Progress::Progress(const Config& config, int64_t total_steps)
    : every_(config.log.every), total_(total_steps), terminal_(isatty(STDERR_FILENO) != 0) {}

void Progress::show(const StepRow& row) {
  seconds_ += row.step_ms / 1e3;
  const double left = seconds_ / static_cast<double>(row.step) * static_cast<double>(total_ - row.step);
  char line[200];
  std::snprintf(line, sizeof line,
                "step %ld/%ld  loss %.4f  norm %.3f  lr %.2e  %.0f tokens/s  %.0f%% of speed of "
                "light  left %s",
                row.step, total_, row.loss, row.grad_norm, row.lr, row.tokens_per_s, row.sol_pct,
                duration(left).c_str());
  if (terminal_) {
    std::fprintf(stderr, "\r\033[K%s", line);
    std::fflush(stderr);
  } else if (row.step % every_ == 0 || row.step == total_) {
    log_line(line);
  }
}

void Progress::finish(const TrainerResult& result) {
  if (terminal_) std::fputc('\n', stderr);
  char line[160];
  std::snprintf(line, sizeof line, "%s after %ld steps: %ld tokens in %s, %.0f tokens/s",
                result.stopped ? "stopped on request" : "done", result.steps, result.tokens,
                duration(result.seconds).c_str(),
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
