#include "launcher/rank/run_files.h"

#include <algorithm>

#include "base/file.h"
#include "base/log.h"
#include "base/staging.h"
#include "config/config_print.h"
#include "launcher/recorded.h"
#include "launcher/status.h"
#include "model/merge.h"
#include "plan/adapter.h"
#include "weights/adapter_files.h"
#include "weights/convert.h"
#include "weights/export_model.h"

namespace lm {
namespace {

// Host copies of a rank's tensors, some rows at a time: what export asks for stays valid until the next
// question.
class HostWeights {
 public:
  HostWeights(const Job& job, Rank& rank, bool merge)
      : job_(job), rank_(rank), merge_(merge), staging_(job.stream) {}

  WeightView view(size_t block, const TensorPlace& place, int64_t row) {
    const DType dtype = job_.plan.numerics.dtype;
    const auto b = static_cast<int64_t>(block);
    const Unit& unit = open(b, place, row);
    const bool lora =
        place.parameter.kind == ParameterKind::kLoraA || place.parameter.kind == ParameterKind::kLoraB;
    if (lora && rank_.training()) {
      // An adapter is exported from its fp32 master, which knows more than the bf16 working weight.
      floats_.resize(static_cast<size_t>(place.parameter.elements()));
      rank_.optimizer().read_master(b, place, open_->trainable(), floats_.data(), staging_);
      if (dtype == DType::kBF16) settle_ties(floats_);  // who loads it in bf16 has what was trained
      return {reinterpret_cast<const std::byte*>(floats_.data()), DType::kF32};
    }
    const std::byte* const home = open_->tensor(place);
    WeightView view{home, dtype, unit.first_row, unit.rows};
    const bool merged = merge_ && place.frozen && !unit.segment();  // the head has no adapter
    if (job_.stream.device == DeviceType::kCpu && !merged) return view;
    const int64_t rows = unit.segment() ? unit.rows : place.parameter.rows;
    const int64_t row_bytes = place.parameter.columns * static_cast<int64_t>(dtype_size(dtype));
    // An adapter is added to a whole tensor; else as many rows as pass at once are enough.
    const int64_t end = view.first_row + rows;
    if (!merged) view.first_row = row;
    view.rows = merged ? rows : std::min(end - row, std::max<int64_t>(staging_.piece_bytes() / row_bytes, 1));
    bytes_.resize(static_cast<size_t>(view.rows * row_bytes));
    staging_.read_into(bytes_.data(), home + (view.first_row - unit.first_row) * row_bytes,
                       std::ssize(bytes_));
    if (merged) {
      merge_adapters(job_.model.layout.blocks[block], place, *job_.model.adapter,
                     {open_->trainable(), bytes_.data(), dtype, job_.stream});
    }
    view.memory = bytes_.data();
    return view;
  }

 private:
  // The unit in which that row of the tensor lies.
  const Unit& open(int64_t block, const TensorPlace& place, int64_t row) {
    WeightStore& store = rank_.weights();
    const std::vector<int64_t> units = store.units_of(block, place);
    const int64_t wanted = units[units.size() == 1 ? 0 : static_cast<size_t>(row / kVocabularySegment)];
    if (!open_ || open_->unit() != wanted) {
      open_.reset();  // before the next: streamed units pass through one slot
      open_.emplace(store.open(wanted, false));
    }
    return store.units()[static_cast<size_t>(wanted)];
  }

  const Job& job_;
  Rank& rank_;
  bool merge_;
  Staging staging_;
  std::optional<OpenUnit> open_;
  std::vector<float> floats_;
  std::vector<std::byte> bytes_;
};

}  // namespace

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
  export_rank(job, rank, path("model"), job.plan.numerics.dtype, false, true);
}

void export_rank(const Job& job, Rank& rank, const std::string& output, DType dtype, bool merge,
                 bool replace) {
  const bool lora = job.model.adapter.has_value();
  rank.step().flush();
  HostWeights weights(job, rank, lora && merge);
  const WeightSource source = [&](size_t block, const TensorPlace& place, int64_t row) {
    return weights.view(block, place, row);
  };
  if (lora && !merge) {
    const BaseModel base{job.config.model.path, job.model.directory};
    write_adapter(output, *job.model.adapter, base, job.model.layout, source, replace);
  } else {
    ExportOptions options;
    options.dtype = dtype;
    options.replace = replace;
    export_model(output, job.model.directory, job.model.layout, source, options);
  }
}

}  // namespace lm
