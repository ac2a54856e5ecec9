// Exports a run's state for Prometheus (log.prometheus): by HTTP, or as a file for node_exporter's textfile
// collector. A thread of its own answers from a snapshot that the compute thread replaces after each step, so
// no scrape delays a step. Rank 0 only; elsewhere, and without the key, every call does nothing.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "config/config.h"
#include "launcher/rank/prometheus_text.h"
#include "launcher/rank/scrape_server.h"
#include "plan/plan.h"
#include "train/metrics.h"
#include "train/step_pulse.h"

namespace lm {

struct RunExportSetup {
  const LogConfig& config;
  std::string run;  // its directory
  const Plan& plan;
  const StepPulse& pulse;  // borrowed
  int64_t total_steps = 0;
  bool leads = true;
};

class RunExport {
 public:
  // Throws Error(12) if nothing can listen at the address.
  explicit RunExport(const RunExportSetup& setup);
  ~RunExport();
  RunExport(const RunExport&) = delete;
  RunExport& operator=(const RunExport&) = delete;

  // The compute thread's calls.
  void step(const StepRow& row, int64_t checkpoint_step);
  void evaluated(const std::string& set, double loss);

 private:
  bool active() const { return thread_.joinable(); }
  void work();
  void write_file();
  std::string text();

  std::string file_;  // "": by HTTP
  const StepPulse& pulse_;
  std::unique_ptr<ScrapeServer> server_;
  std::mutex mutex_;  // guards now_
  RunMetrics now_;
  // The thread's own.
  uint64_t beats_ = 0;
  double moved_at_ = 0;  // monotonic: when the progress counter was last seen to move
  bool warned_ = false;
  std::unique_ptr<GpuMeter> gpus_;
  std::atomic<bool> leave_ = false;
  std::thread thread_;
};

}  // namespace lm
