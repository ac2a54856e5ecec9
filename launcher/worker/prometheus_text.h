// A run's state as Prometheus' text format 0.0.4. Pure; any thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launcher/machine/gpu_meter.h"

namespace lm {

struct RunMetrics {
  std::string run, version;
  int64_t step = 0, total_steps = 0;
  double loss = 0, grad_norm = 0, lr = 0, tokens_per_s = 0, step_seconds = 0, utilization = 0;
  double last_step_time = 0;                // unix seconds; 0: this start has done no step yet
  int64_t tokens = 0, skipped_steps = 0;    // of this start
  std::map<std::string, double> eval_loss;  // by set; "": the only one
  int64_t checkpoint_step = 0;
  double heartbeat_age = 0;  // seconds since the rank's progress counter has moved
  // By tier and by link.
  std::map<std::string, int64_t> memory, planned_memory, link_bytes;
  std::vector<GpuReading> gpus;
};

std::string prometheus_text(const RunMetrics& metrics);

}  // namespace lm
