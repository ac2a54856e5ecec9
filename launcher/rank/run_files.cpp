#include "launcher/rank/run_files.h"

#include "base/file.h"
#include "base/log.h"
#include "config/config_print.h"
#include "launcher/recorded.h"
#include "launcher/status.h"
#include "plan/adapter.h"
#include "weights/adapter_files.h"
#include "weights/export_model.h"
#include "weights/export_source.h"

namespace lm {
Config resolved_config(const Job& job, const std::string& directory) {
  Config config = job.config;
  config.run.dir = directory;
  config.run.device = job.stream.device == DeviceType::kCuda ? DeviceChoice::kCuda : DeviceChoice::kCpu;
  config.run.threads = job.plan.numerics.threads;
  config.train.micro_batch = job.plan.numerics.micro_batch;
  config.train.recompute = job.plan.numerics.recompute ? Recompute::kBlock : Recompute::kNone;
  config.optimizer.threads = job.plan.placement.optimizer_threads;
  if (job.model.adapter) config.lora = resolved_lora(config.lora, *job.model.adapter);
  if (!config.train.epochs && !config.train.steps) config.train.epochs = 1;
  return config;
}

void RunFiles::begin(const Job& job) const {
  log_to_file(path("log.txt"));
  // First: whoever finds this configuration finds its numerics.
  atomic_write_file(path(kNumericsFile), numerics_json(job.plan.numerics) + "\n");
  atomic_write_file(path("config.toml"), print_config(resolved_config(job, directory_)));
  atomic_write_file(path("plan.txt"), print_plan(job.plan));
  atomic_write_file(path("plan.json"), plan_json(job.plan) + "\n");
}

void RunFiles::running(int64_t step) const {
  RunStatus status;
  status.state = "running";
  status.step = step;
  write_status(directory_, status);
}

void RunFiles::write_model(const Job& job, Rank& rank) const {
  export_rank(job, rank, path("model"), true);
}

void export_rank(const Job& job, Rank& rank, const std::string& output, bool replace) {
  rank.step().flush();
  MasterReader masters;
  if (rank.training()) {
    masters = [&rank](int64_t block, const TensorPlace& place, const std::byte* weights, float* out,
                      Staging& staging) {
      rank.optimizer().read_master(block, place, weights, out, staging);
    };
  }
  const DType dtype = job.plan.numerics.dtype;
  StoreSource source(rank.weights(), dtype, job.stream, masters);
  write_export(
      job,
      [&source](size_t block, const TensorPlace& place, int64_t row) {
        return source.view(block, place, row);
      },
      {.output = output, .dtype = dtype, .adapter = job.model.adapter.has_value(), .replace = replace});
}

void write_export(const Job& job, const WeightSource& source, const ExportRequest& request) {
  if (request.adapter) {
    const BaseModel base{job.config.model.path, job.model.directory};
    return write_adapter(request.output, *job.model.adapter, base, job.model.layout, source, request.replace);
  }
  ExportOptions options;
  options.dtype = request.dtype;
  options.replace = request.replace;
  export_model(request.output, job.model.directory, job.model.layout, source, options);
}

}  // namespace lm
