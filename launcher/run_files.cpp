#include "launcher/run_files.h"

#include "base/file.h"
#include "base/log.h"
#include "config/config_print.h"
#include "launcher/status.h"
#include "model/merge.h"
#include "weights/adapter_files.h"
#include "weights/export_model.h"

namespace lm {
namespace {

// Host copies of a rank's tensors, one at a time: what export asks for stays valid until the next question.
class HostWeights {
 public:
  HostWeights(const Job& job, Rank& rank, bool merge) : job_(job), rank_(rank), merge_(merge) {}

  WeightView view(size_t block, const TensorPlace& place) {
    const DType dtype = job_.plan.numerics.dtype;
    const auto b = static_cast<int64_t>(block);
    if (!open_ || open_->block() != b) {
      open_.reset();  // before the next: streamed blocks pass through one slot
      open_.emplace(rank_.weights().open(b, false));
    }
    const bool lora =
        place.parameter.kind == ParameterKind::kLoraA || place.parameter.kind == ParameterKind::kLoraB;
    if (lora && rank_.training()) {
      // An adapter is exported from its fp32 master, which knows more than the bf16 working weight.
      floats_.resize(static_cast<size_t>(place.parameter.elements()));
      rank_.optimizer().read_master(b, place, open_->trainable(), floats_.data());
      return {reinterpret_cast<const std::byte*>(floats_.data()), DType::kF32};
    }
    const auto size = static_cast<int64_t>(dtype_size(dtype));
    const std::byte* const home =
        place.frozen ? open_->frozen() + place.offset : open_->trainable() + place.offset * size;
    if (merge_ && place.frozen) {
      bytes_.resize(static_cast<size_t>(place.parameter.elements() * size));
      copy_bytes(bytes_.data(), home, static_cast<int64_t>(bytes_.size()), job_.stream);
      merge_adapters(job_.layout.blocks[block], place, *job_.adapter,
                     {open_->trainable(), bytes_.data(), dtype, job_.stream});
      return {bytes_.data(), dtype};
    }
    if (job_.stream.device == DeviceType::kCpu) return {home, dtype};
    bytes_.resize(static_cast<size_t>(place.parameter.elements() * size));
    copy_bytes(bytes_.data(), home, static_cast<int64_t>(bytes_.size()), job_.stream);
    return {bytes_.data(), dtype};
  }

 private:
  const Job& job_;
  Rank& rank_;
  bool merge_;
  std::optional<OpenBlock> open_;
  std::vector<float> floats_;
  std::vector<std::byte> bytes_;
};

}  // namespace

Config resolved_config(const Job& job, const std::string& directory) {
  Config config = job.config;
  config.run.dir = directory;
  config.run.threads = job.plan.numerics.threads;
  config.train.micro_batch = job.plan.numerics.micro_batch;
  config.train.recompute = job.plan.numerics.recompute ? Recompute::kBlock : Recompute::kNone;
  config.optimizer.threads = job.plan.placement.optimizer_threads;
  if (!config.train.epochs && !config.train.steps) config.train.epochs = 1;
  return config;
}

void RunFiles::begin(const Job& job) const {
  log_to_file(path("log.txt"));
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
  export_rank(job, rank, path("model"), job.plan.numerics.dtype, false, true);
}

void export_rank(const Job& job, Rank& rank, const std::string& output, DType dtype, bool merge,
                 bool replace) {
  const bool lora = job.adapter.has_value();
  rank.step().flush();
  HostWeights weights(job, rank, lora && merge);
  const WeightSource source = [&](size_t block, const TensorPlace& place) {
    return weights.view(block, place);
  };
  if (lora && !merge) {
    const BaseModel base{job.config.model.path, job.model_directory};
    write_adapter(output, *job.adapter, base, job.layout, source, replace);
  } else {
    ExportOptions options;
    options.dtype = dtype;
    options.replace = replace;
    export_model(output, job.model_directory, job.layout, source, options);
  }
}

}  // namespace lm
