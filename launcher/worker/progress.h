// Progress of a run as it is printed (progress_line.h), and its summary.
#pragma once

#include <string>

#include "config/config.h"
#include "launcher/worker/disk_pace.h"
#include "plan/plan.h"
#include "train/trainer.h"

namespace lm {

class Progress {
 public:
  // `evaluates`: every train.eval_every steps.
  Progress(const Config& config, const Plan& plan, int64_t total_steps, bool evaluates);
  // Logs the line that explains the progress lines; before the first step.
  void begin(bool gpu) const;
  // `since_save`: seconds since the last save.
  void show(const StepRow& row, double since_save);
  void finish(const TrainerResult& result);

 private:
  double seconds_to_save(int64_t step, double mean_seconds, double since_save) const;

  void watch_disks(const StepRow& row);

  int64_t every_, eval_every_;
  Interval checkpoint_;
  int64_t total_;
  int64_t steps_ = 0;                         // of this start
  double seconds_ = 0;                        // in these, for the time left
  double host_bytes_ = 0, device_bytes_ = 0;  // sums over these steps
  DiskPace disks_;
};

// Logs peak memory against the plan, where the result is, and what to do with it.
void show_result(const Plan& plan, bool lora, const TrainerResult& result, const std::string& run);

}  // namespace lm
