// What a person sees of a run (progress_line.h), and what it took.
#pragma once

#include <string>

#include "config/config.h"
#include "plan/plan.h"
#include "train/trainer.h"

namespace lm {

class Progress {
 public:
  Progress(const Config& config, int64_t total_steps) : every_(config.log.every), total_(total_steps) {}
  void show(const StepRow& row);
  void finish(const TrainerResult& result);

 private:
  int64_t every_;
  int64_t total_;
  double seconds_ = 0;  // in steps so far, for the time left
};

// "1.21 GiB (planned 1.25 GiB)"; on a GPU, where `device_bytes` is not 0, ", of the GPU's 20.1 GiB (planned
// 20.9 GiB)" behind it.
std::string format_peak(const Plan& plan, int64_t device_bytes);

}  // namespace lm
