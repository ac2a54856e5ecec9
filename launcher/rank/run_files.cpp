#include "launcher/rank/run_files.h"

#include <unistd.h>

#include <algorithm>

#include "base/file.h"
#include "base/log.h"
#include "checkpoint/restore.h"
#include "checkpoint/trained_values.h"
#include "config/config_print.h"
#include "launcher/presets.h"
#include "launcher/recorded.h"
#include "launcher/status.h"
#include "optim/shards.h"
#include "plan/adapter.h"
#include "plan/step_lanes.h"
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
  config.train.update = job.plan.placement.in_backward() ? UpdateTime::kInBackward : UpdateTime::kAfter;
  config.optimizer.threads = job.plan.placement.optimizer_threads;
  if (job.model.adapter) config.lora = resolved_lora(config.lora, *job.model.adapter);
  if (job.model.adapter) config.lora.dtype = adapter_type(config);
  if (!config.train.epochs && !config.train.steps) config.train.epochs = 1;
  return config;
}

void RunFiles::begin(const Job& job, const std::string& asked) const {
  if (!writes_) return;
  log_to_file(path("log.txt"));
  // First: whoever finds this configuration finds its numerics.
  atomic_write_file(path(kNumericsFile), numerics_json(job.plan.numerics) + "\n");
  const std::string mark = preset_mark(preset_of(read_small_file(asked, kMiB)));
  atomic_write_file(path("config.toml"), mark + print_config(resolved_config(job, directory_)));
  atomic_write_file(path("plan.txt"), print_plan(job.plan));
  const PlanInputs inputs = job.model.inputs(job.config, job.stream.device);
  const auto lanes = step_lanes(inputs, share_of_machine(job.machine, job.ranks_on_machine), job.plan);
  atomic_write_file(path("plan.json"), plan_json(job.plan, lanes) + "\n");
}

void RunFiles::keep_template(const Job& job) const {
  if (writes_ && !job.chat_template.empty()) atomic_write_file(path(kChatTemplate), job.chat_template);
}

void RunFiles::running(int64_t step) const {
  if (!writes_) return;
  RunStatus status;
  status.state = "running";
  status.step = step;
  status.pid = getppid();  // the door's
  write_status(directory_, status);
}

std::unique_ptr<EventFile> RunFiles::events(const LogConfig& log) const {
  return writes_ && log.tensorboard ? std::make_unique<EventFile>(path("tensorboard")) : nullptr;
}

namespace {

// fp32 masters of everything that is trained, by block, of which each rank has its shards.
std::vector<std::vector<float>> gather_masters(const Job& job, Rank& rank) {
  std::vector<std::vector<float>> out(job.model.layout.blocks.size());
  Staging staging(job.stream);
  for (int64_t u = 0; u < std::ssize(rank.weights().units()); ++u) {
    const Unit& unit = rank.weights().units()[static_cast<size_t>(u)];
    if (unit.elements == 0) continue;
    std::vector<float>& block = out[static_cast<size_t>(unit.block)];
    block.resize(static_cast<size_t>(unit.elements));
    const OpenUnit open = rank.weights().open(u, false);
    for (const TensorPlace& place : job.model.layout.blocks[static_cast<size_t>(unit.block)].tensors) {
      if (!place.frozen)
        rank.optimizer().read_master(unit.block, place, open.trainable(), block.data() + place.offset,
                                     staging);
    }
    rank.group().share("masters", reinterpret_cast<std::byte*>(block.data()),
                       shard_bytes(unit, rank.group().ranks(), sizeof(float)));
  }
  return out;
}

}  // namespace

bool trains_in_shards(const Job& job) {
  return job.plan.placement.pool(Pool::kWeights).shards > 1 && !job.model.adapter;
}

namespace {

void export_checkpoint(const Job& job, const std::string& checkpoint, const std::string& output) {
  const int threads = job.plan.numerics.threads;
  CheckpointReader reader(checkpoint, threads);
  ExportFiles files{
      .spec = job.model.spec, .layout = job.model.layout, .model = "", .adapter = "", .threads = threads};
  files.trained = [&reader](size_t block, int64_t first, int64_t elements, float* out) {
    TrainedValues(reader, false).read(static_cast<int64_t>(block), first, elements, out);
  };
  FileSource source(files);
  write_export(job,
               [&source](size_t block, const TensorPlace& place, int64_t row) {
                 return source.view(block, place, row);
               },
               {.output = output, .dtype = job.plan.numerics.dtype, .adapter = false, .replace = true});
}

}  // namespace

void RunFiles::write_model(const Job& job, Rank& rank, const std::string& checkpoint) const {
  rank.step().flush();
  if (trains_in_shards(job)) {
    if (writes_) export_checkpoint(job, checkpoint, path("model"));
    return;
  }
  std::vector<std::vector<float>> masters;
  if (job.plan.placement.sharded && job.model.adapter) masters = gather_masters(job, rank);
  if (writes_) export_rank(job, rank, path("model"), true, masters);
}

std::string own_template(const Subject& subject) {
  const std::string& directory = subject.run.empty() ? subject.trained : subject.run;
  const std::string path = directory + "/" + kChatTemplate;
  return !directory.empty() && std::filesystem::exists(path) ? read_small_file(path, kMiB) : "";
}

void export_rank(const Job& job, Rank& rank, const std::string& output, bool replace,
                 const std::vector<std::vector<float>>& gathered) {
  rank.step().flush();
  MasterReader masters;
  if (!gathered.empty()) {
    masters = [&gathered](int64_t block, const TensorPlace& place, const std::byte*, float* out, Staging&) {
      std::copy_n(gathered[static_cast<size_t>(block)].begin() + place.offset, place.parameter.elements(),
                  out);
    };
  } else if (rank.training()) {
    masters = [&rank](int64_t block, const TensorPlace& place, const std::byte* weights, float* out,
                      Staging& staging) {
      rank.optimizer().read_master(block, place, weights, out, staging);
    };
  }
  const DType dtype = job.plan.numerics.dtype;
  StoreSource source(rank.weights(), job.plan.numerics.trained_dtype(), job.stream, masters);
  write_export(
      job,
      [&source](size_t block, const TensorPlace& place, int64_t row) {
        return source.view(block, place, row);
      },
      {.output = output, .dtype = dtype, .adapter = job.model.adapter.has_value(), .replace = replace});
}

void write_export(const Job& job, const WeightSource& source, const ExportRequest& request) {
  if (request.adapter) {
    const BaseModel base{job.config.model.path, job.model.directory, job.chat_template};
    return write_adapter(request.output, *job.model.adapter, base, job.model.layout, source, request.replace);
  }
  ExportOptions options;
  options.dtype = request.dtype;
  options.replace = request.replace;
  options.chat_template = job.chat_template;
  export_model(request.output, job.model.directory, job.model.layout, source, options);
}

}  // namespace lm
