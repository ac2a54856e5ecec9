// Exports a run's state for Prometheus (log.prometheus): by HTTP, or as a file for node_exporter's textfile
// collector. Threads of its own answer from a snapshot that the compute thread replaces after each step, so
// no scrape delays a step. Rank 0 only; elsewhere, and without the key, every call does nothing.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "config/config.h"
#include "launcher/worker/prometheus_text.h"
#include "launcher/worker/scrape_server.h"
#include "plan/plan.h"
#include "train/metrics.h"
#include "train/progress_counter.h"

namespace lm {

struct RunExportSetup {
  const LogConfig& config;
  std::string run;  // its directory
  const Plan& plan;
  const ProgressCounter& progress_counter;  // borrowed
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
  const ProgressCounter& progress_counter_;
  std::mutex mutex_;  // guards these two
  RunMetrics now_;
  double moved_at_ = 0;   // monotonic: when the progress counter was last seen to move
  std::mutex gpu_mutex_;  // NVML takes longer than a step may wait
  std::unique_ptr<GpuMeter> gpus_;
  // The thread's own.
  uint64_t operations_ = 0;
  bool warned_ = false;
  std::atomic<bool> leave_ = false;
  std::thread thread_;
  std::unique_ptr<ScrapeServer> server_;  // its threads end first
};

}  // namespace lm
