// A run's state as Prometheus' text format 0.0.4. Pure; any thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
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

// What a request's head asks for: the text up to the empty line. Only "GET /metrics" and "GET /" of HTTP/1.x
// get the metrics, and HEAD their head.
enum class Scrape : uint8_t { kMetrics, kHead, kNotFound, kNotAllowed, kMalformed };
Scrape scrape_of(std::string_view head);
// The whole answer; `body`: the metrics.
std::string scrape_answer(Scrape scrape, const std::string& body);

}  // namespace lm
