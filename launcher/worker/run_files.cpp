#include "launcher/worker/run_files.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "base/file.h"
#include "base/hub_snapshot.h"
#include "base/json.h"
#include "base/log.h"
#include "config/config_print.h"
#include "export/computed_prompt.h"
#include "export/each_expert.h"
#include "export/export_adapter.h"
#include "export/export_model.h"
#include "export/export_source.h"
#include "export/plain_adapter.h"
#include "launcher/presets.h"
#include "launcher/recorded.h"
#include "launcher/status.h"
#include "launcher/worker/checkpoint_weights.h"
#include "optim/shards.h"
#include "plan/adapter.h"
#include "plan/step_lanes.h"
#include "weights/adapter_files.h"
#include "weights/loader.h"

namespace lm {
Config resolved_config(const Job& job, const std::string& directory) {
  Config config = job.config;
  config.run.dir = directory;
  config.run.device = job.stream.device == DeviceType::kCuda ? DeviceChoice::kCuda : DeviceChoice::kCpu;
  config.run.threads = job.plan.numerics.threads;
  config.train.micro_batch = job.plan.numerics.micro_batch;
  config.train.recompute = job.plan.recompute();
  config.train.update = job.plan.placement.in_backward() ? UpdateTime::kInBackward : UpdateTime::kAfter;
  config.optimizer.threads = job.plan.placement.optimizer_threads;
  if (job.model.adapter) config.lora = resolved_lora(job.model.spec, config.lora, *job.model.adapter);
  if (job.model.adapter) config.lora.dtype = adapter_type(config);
  if (job.model.virtual_tokens() > 0) config.prompt.length = job.model.virtual_tokens();
  if (job.model.adapter && job.model.adapter->encoder > 0) config.prompt.hidden = job.model.adapter->encoder;
  if (!config.train.epochs && !config.train.steps) config.train.epochs = 1;
  return config;
}

void RunFiles::write(const std::string& name, std::string text) {
  if (!holds_) return atomic_write_file(path(name), text);
  held_.emplace_back(name, std::move(text));
}

void RunFiles::write_held() {
  holds_ = false;
  for (const auto& [name, text] : held_) atomic_write_file(path(name), text);
  held_.clear();
}

void RunFiles::begin(const Job& job, const std::string& asked, bool fresh) {
  if (!writes_) return;
  log_to_file(path("log.txt"));
  holds_ = std::filesystem::exists(path("config.toml"));
  // First: a reader of this configuration must find its numerics.
  write(kNumericsFile, numerics_json(job.plan.recorded_numerics()) + "\n");
  const std::string text = read_small_file(asked, kMiB);
  const std::string mark = preset_mark(preset_of(text)) + auto_mark(job.config, text);
  write("config.toml", mark + print_config(resolved_config(job, directory_)));
  record_base(job, fresh);
  write_plan(job);
}

void RunFiles::write_plan(const Job& job) {
  if (!writes_) return;
  write("plan.txt", print_plan(job.plan));
  const auto lanes =
      step_lanes(plan_inputs(job), share_of_machine(job.machine, job.ranks_on_machine), job.plan);
  write("plan.json", plan_json(job.plan, lanes) + "\n");
}

void RunFiles::record_base(const Job& job, bool fresh) {
  const auto hub = name_of_snapshot(job.model.origin());
  if (hub) log_line("model: " + hub->repository() + ", revision " + hub->revision);
  if (!fresh) return;
  std::error_code ignored;
  if (!hub) std::filesystem::remove(path(kBaseModelFile), ignored);
  if (hub)
    write(kBaseModelFile, Json{{"name", hub->repository()}, {"revision", hub->revision}}.dump() + "\n");
}

void RunFiles::keep_template(const Job& job) {
  if (writes_ && !job.chat_template.empty()) write(kChatTemplate, job.chat_template);
}

void RunFiles::running(int64_t step) {
  if (!writes_) return;
  write_held();
  RunStatus status;
  status.state = "running";
  status.step = step;
  status.ranks = ranks_;
  status.ranks_asked = asked_;
  status.pid = getppid();  // the CLI process
  write_status(directory_, status);
}

std::unique_ptr<EventFile> RunFiles::events(const LogConfig& log) const {
  const bool asked = std::ranges::find(log.to, LogTarget::kTensorboard) != log.to.end();
  return writes_ && asked ? std::make_unique<EventFile>(path("tensorboard")) : nullptr;
}

namespace {

// fp32 master weights of what is exported from them, by block; each rank has its shards.
std::vector<std::vector<float>> gather_masters(const Job& job, Rank& rank) {
  std::vector<std::vector<float>> out(job.model.layout.blocks.size());
  Staging staging(job.stream);
  for (int64_t u = 0; u < std::ssize(rank.weights().units()); ++u) {
    const Unit& unit = rank.weights().units()[static_cast<size_t>(u)];
    const std::vector<Trainable>& trained =
        job.model.layout.blocks[static_cast<size_t>(unit.block)].trainables;
    const bool wanted =
        std::ranges::any_of(trained, [](const Trainable& entry) { return exports_masters(entry.role); });
    if (unit.elements == 0 || !wanted) continue;
    std::vector<float>& block = out[static_cast<size_t>(unit.block)];
    block.resize(static_cast<size_t>(unit.elements));
    const OpenUnit open = rank.weights().open(u, false);
    for (const TensorPlace& place : job.model.layout.blocks[static_cast<size_t>(unit.block)].tensors) {
      if (!place.frozen && exports_masters(place.parameter.role))
        rank.optimizer().read_master(unit.block, place, open.trainable(), block.data() + place.offset,
                                     staging);
    }
    rank.group().all_gather("masters", reinterpret_cast<std::byte*>(block.data()),
                            shard_bytes(unit, job.plan.placement.sharding(), sizeof(float)));
  }
  return out;
}

}  // namespace

std::string frozen_source(const Job& job) {
  const bool fresh = job.config.model.init == ModelInit::kRandom;
  return job.model.layout.frozen_elements == 0 || fresh ? "" : job.model.directory;
}

bool trains_in_shards(const Job& job) {
  return job.plan.placement.pool(Pool::kWeights).shards > 1 && !job.model.adapter;
}

void RunFiles::write_model(const Job& job, Rank& rank, const std::string& checkpoint) {
  write_held();  // the loop had no step to do
  rank.step().flush();
  if (trains_in_shards(job)) {
    if (!writes_) return;
    const DType dtype = job.plan.numerics.dtype;
    CheckpointWeights weights(job, checkpoint, dtype);
    return write_export(job, weights.source(), {.output = path("model"), .dtype = dtype, .replace = true});
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
  write_export(job,
               [&source](size_t block, const TensorPlace& place, int64_t row) {
                 return source.view(block, place, row);
               },
               {.output = output,
                .dtype = dtype,
                .adapter = job.model.adapter.has_value(),
                .replace = replace,
                .patterns = true});  // a run's own files are read again as they are
}

BaseModel base_of_adapter(const std::string& path, const std::string& directory, const ModelSpec& spec,
                          const std::string& chat_template) {
  BaseModel base{.name = path,
                 .directory = directory,
                 .chat_template = chat_template,
                 .architecture = spec.architecture,
                 .revision = "",
                 .scores = spec.scores(),
                 .wrapped = !spec.wrapper.empty(),
                 .spec = &spec};
  if (const auto hub = name_of_snapshot(directory)) {
    base.name = hub->repository();
    base.revision = hub->revision;
  }
  return base;
}

BaseModel base_of_adapter(const Job& job) {
  BaseModel base =
      base_of_adapter(job.config.model.path, job.model.origin(), job.model.spec, job.chat_template);
  base.directory = job.model.directory;
  base.grown = job.model.grown.has_value() && job.config.model.init != ModelInit::kRandom;
  return base;
}

void write_export(const Job& job, const WeightSource& source, const ExportRequest& request) {
  if (request.adapter) {
    const BaseModel base = base_of_adapter(job);
    const AdapterForm form{.replace = request.replace, .patterns = request.patterns};
    if (job.model.adapter->encoder > 0) {
      const ComputedPrompt prompt(job.model.spec, *job.model.adapter, job.model.layout, source);
      return write_adapter(request.output, prompt.spec(), base, prompt.layout(), prompt.source(), form);
    }
    if (request.each_expert) {
      const EachExpert each = each_expert(*job.model.adapter, job.model.layout);
      return write_adapter(request.output, each.spec, base, each.layout, source, form);
    }
    if (!job.model.adapter->pissa)
      return write_adapter(request.output, *job.model.adapter, base, job.model.layout, source, form);
    const PlainAdapter plain(job.model.spec, *job.model.adapter, job.model.layout, source,
                             principal_pairs(job, request.dtype));
    return write_adapter(request.output, plain.spec(), base, plain.layout(), plain.source(), form);
  }
  ExportOptions options;
  options.dtype = request.dtype;
  options.replace = request.replace;
  options.fresh = job.config.model.init == ModelInit::kRandom;
  options.unread = unread_modules(job.model.spec);
  options.chat_template = job.chat_template;
  if (job.model.spec.scores()) options.scores = &job.model.spec;
  export_model(request.output, job.model.directory, job.model.layout, source, options);
}

}  // namespace lm
