#include "launcher/worker/stop_request.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <limits>

#include "base/clock.h"
#include "base/log.h"
#include "launcher/environment.h"

namespace lm {
namespace {

constexpr double kLeastSeconds = 1;  // leaving takes some time, too

}  // namespace

StopRequest::StopRequest(const Control& control, const RunConfig& config, std::string run_directory)
    : control_(control), file_(std::move(run_directory) + "/STOP") {
  if (config.time_limit) {
    end_ = monotonic_seconds() + static_cast<double>(config.time_limit->seconds);
  } else if (const std::optional<int64_t> end = job_end_time()) {
    end_ = monotonic_seconds() + static_cast<double>(*end) - unix_seconds();
    log_line(fmt::format("the Slurm job ends in {} s: the run saves and leaves before that",
                         std::max<int64_t>(static_cast<int64_t>(seconds_left()), 0)));
  }
  // A file left by an earlier run has had its effect.
  if (unlink(file_.c_str()) == 0) log_note("RUN-27", file_ + " is from an earlier run, and was removed");
}

double StopRequest::seconds_left() const {
  return end_ ? *end_ - monotonic_seconds() : std::numeric_limits<double>::infinity();
}

bool StopRequest::requested() {
  if (requested_) return true;
  if (control_.stop_requests() == 0) {
    if (seconds_left() < (step_ + save_) * kSlack + kLeastSeconds)
      reason_ = "time_limit";
    else if (access(file_.c_str(), F_OK) == 0)
      reason_ = "stop_file";
    else
      return false;
  }
  return requested_ = true;
}

}  // namespace lm
