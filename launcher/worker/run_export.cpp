#include "launcher/worker/run_export.h"

#include <chrono>
#include <filesystem>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "config/listen_address.h"

namespace lm {
namespace {

// How often the progress counter is looked at, and a file is written again.
constexpr int kLookMs = 100;
constexpr double kFileSeconds = 5;

}  // namespace

RunExport::RunExport(const RunExportSetup& setup) : progress_counter_(setup.progress_counter) {
  const std::string& where = setup.config.prometheus;
  if (where.empty() || !setup.leads) return;
  const std::filesystem::path run = std::filesystem::absolute(setup.run).lexically_normal();
  now_.run = run.filename().empty() ? run.parent_path().filename().string() : run.filename().string();
  now_.version = LM_VERSION;
  now_.total_steps = setup.total_steps;
  moved_at_ = monotonic_seconds();
  const PeakBytes& peak = setup.plan.peak;
  now_.planned_memory = {{"host", peak.host}};
  if (peak.device > 0) now_.planned_memory["device"] = peak.device;
  if (peak.disk > 0) now_.planned_memory["disk"] = peak.disk;
  if (means_address(where)) {
    server_ = std::make_unique<ScrapeServer>(where, [this] { return text(); });
    log_line("prometheus: " + server_->url());
  } else {
    file_ = where;
  }
  thread_ = std::thread([this] { work(); });
}

RunExport::~RunExport() {
  leave_ = true;
  if (active()) thread_.join();
}

void RunExport::step(const StepRow& row, int64_t checkpoint_step) {
  if (!active()) return;
  const std::lock_guard lock(mutex_);
  now_.step = row.step;
  now_.loss = row.loss, now_.grad_norm = row.grad_norm, now_.lr = row.lr;
  now_.tokens_per_s = row.tokens_per_s;
  now_.step_seconds = row.step_ms / 1e3;
  now_.utilization = row.sol_pct / 100;
  now_.last_step_time = unix_seconds();
  now_.tokens += row.tokens;
  now_.skipped_steps += row.skipped;
  now_.checkpoint_step = checkpoint_step;
  now_.memory["host"] = row.host_bytes;
  if (row.device_bytes > 0) now_.memory["device"] = row.device_bytes;
  if (row.disk_bytes > 0) now_.memory["disk"] = row.disk_bytes;
  now_.link_bytes["disk_read"] += row.read_bytes;
  now_.link_bytes["disk_write"] += row.written_bytes;
  now_.link_bytes["to_device"] += row.to_device_bytes;
  now_.link_bytes["from_device"] += row.from_device_bytes;
  now_.link_bytes["ranks"] += row.sent_bytes;
  now_.link_bytes["machines"] += row.between_machines_bytes;
}

void RunExport::evaluated(const std::string& set, double loss) {
  if (!active()) return;
  const std::lock_guard lock(mutex_);
  now_.eval_loss[set] = loss;
}

std::string RunExport::text() {
  RunMetrics metrics;
  {
    const std::lock_guard lock(mutex_);
    metrics = now_;
    metrics.heartbeat_age = monotonic_seconds() - moved_at_;
  }
  {
    const std::lock_guard lock(gpu_mutex_);
    if (!gpus_) gpus_ = std::make_unique<GpuMeter>();
    metrics.gpus = gpus_->read();
  }
  return prometheus_text(metrics);
}

void RunExport::write_file() {
  try {
    atomic_write_file(file_, text());
  } catch (const Error& error) {
    if (!std::exchange(warned_, true))
      log_warning("PROM-40", std::string("log.prometheus: ") + error.what() + "; training continues");
  }
}

void RunExport::work() {
  double written = -kFileSeconds;
  while (!leave_) {
    if (const uint64_t operations = progress_counter_.latest().count; operations != operations_) {
      operations_ = operations;
      const std::lock_guard lock(mutex_);
      moved_at_ = monotonic_seconds();
    }
    if (!file_.empty() && monotonic_seconds() - written >= kFileSeconds) {
      write_file();
      written = monotonic_seconds();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(kLookMs));
  }
  if (!file_.empty()) write_file();
}

}  // namespace lm
