// Why a run ends before its last step: a signal that the CLI process has counted, a time limit
// (run.time_limit, or the end of the Slurm job) that the next step and a save would exceed, or a file STOP in
// the run's directory. One thread, the rank's.
#pragma once

#include <optional>
#include <string>

#include "config/config.h"
#include "launcher/control.h"

namespace lm {

class StopRequest {
 public:
  StopRequest(const Control& control, const RunConfig& config, std::string run_directory);

  // Expected duration of the next step and of a save.
  void expect(double step_seconds, double save_seconds) { step_ = step_seconds, save_ = save_seconds; }
  // Call between steps; once true it stays true.
  bool requested();
  // Whether a save can end before the time limit.
  bool time_to_save() const { return save_ * kSlack < seconds_left(); }
  // "" if not requested, or if the CLI process knows (a signal); "time_limit", "stop_file".
  const std::string& reason() const { return reason_; }

 private:
  static constexpr double kSlack = 1.3;  // steps and saves vary
  double seconds_left() const;
  const Control& control_;
  std::string file_;
  std::optional<double> end_;  // monotonic
  double step_ = 0, save_ = 0;
  bool requested_ = false;
  std::string reason_;
};

}  // namespace lm
