#include "launcher/rank/job.h"

#include <algorithm>
#include <filesystem>
#include <optional>

#include "base/cuda.h"
#include "base/error.h"
#include "base/log.h"
#include "base/process.h"
#include "checkpoint/restore.h"
#include "config/config_text.h"
#include "config/config_toml.h"
#include "kernels/gemm_rate.h"
#include "kernels/runtime.h"
#include "launcher/machine/disk_survey.h"
#include "launcher/machine/machine_survey.h"
#include "launcher/machine/rates.h"
#include "launcher/machine/survey.h"
#include "launcher/recorded.h"
#include "offload/copy_probe.h"
#include "weights/load_store.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

// The GPU at the front of CUDA's enumeration. NVML is asked first: a context of ours takes from what is free.
GpuFacts select_gpu() {
  const GpuSurvey survey = survey_gpus();
  std::string reason;
  if (cuda_device_count(&reason) == 0) {
    const std::optional<std::string> list = read_cuda_variables().visible_devices;
    throw Error(Exit::kDoesNotFit, {.area = "GPU-34",
                                    .what = "CUDA shows no GPU" + (reason.empty() ? "" : ": " + reason),
                                    .place = list ? "CUDA_VISIBLE_DEVICES=\"" + *list + "\"" : "",
                                    .next = "`lmlaunch doctor` tells more; --gpus 0 uses the CPU",
                                    .kept = ""});
  }
  const ComputingGpu gpu = computing_gpu(survey, cuda_device(0));
  log_line("computing on " + gpu.facts.name + " (" + gpu.facts.uuid + ")");
  if (!gpu.note.empty()) log_note("GPU-34", gpu.note);
  return gpu.facts;
}

// `planned`: the run's host memory. Half a second.
MeasuredRates measure_rates(const RateSubject& subject, StreamView stream, int64_t planned) {
  MeasuredRates rates;
  if (subject.device == DeviceType::kCpu) {
    const GemmRate gemm = measure_gemm_rate(subject.dtype, stream);
    rates.gemm_flops = gemm.ceiling;
    rates.gemm_sustained = gemm.sustained / gemm.ceiling;
  } else {
    rates.link_bandwidth = probe_copies(subject.device).each_way();
  }
  // The probe copies from one half of its memory to the other, and must not be the run's peak.
  const int64_t bytes = std::clamp<int64_t>(planned / 16, 8 * kMiB, 128 * kMiB);
  rates.memory_bandwidth = probe_host_memory(stream.threads, bytes);
  return rates;
}

// As kept, else measured.
MeasuredRates rates_of(const Job& job, const RateSubject& subject, int64_t planned) {
  const std::string& cache = job.environment.cache_dir;
  if (const auto known = known_rates(job.machine, subject, cache)) return *known;
  const MeasuredRates rates = measure_rates(subject, job.stream, planned);
  keep_rates(job.machine, subject, rates, cache);
  return rates;
}

bool moves_state(const PlacementPlan& placement) {
  return placement.update_on_host || std::any_of(placement.pools.begin(), placement.pools.end(),
                                                 [](const PoolPlan& pool) { return pool.slots > 0; });
}

// Striped by measured bandwidth; equally where one of them was not measured. What is free on one path bounds
// its share where there are others.
std::vector<SwapPath> swap_paths(const Job& job) {
  const std::vector<Disk>& disks = job.machine.disks;
  const bool measured =
      std::all_of(disks.begin(), disks.end(), [](const Disk& disk) { return disk.write_bandwidth > 0; });
  std::vector<SwapPath> paths;
  for (const Disk& disk : disks) {
    paths.push_back({disk.path, measured ? disk.write_bandwidth : 1});
    const int64_t room = path_room(job.config.offload, disk);
    if (room > 0 && (disks.size() > 1 || job.config.offload.disk_limit)) paths.back().limit = room;
  }
  return paths;
}

PrepareOptions prepare_options(const Job& job, const std::vector<std::string>& files) {
  const DataConfig& data = job.config.data;
  const fs::path program =
      fs::path(beside_this_program("lmlaunch-cpu")).parent_path() / "../share/lmlaunch/prepare";
  return {.files = files,
          .format = data.format,
          .loss_on = data.loss_on,
          .model_dir = job.model.directory,
          .cache_dir = data.cache_dir.empty() ? job.environment.token_cache() : data.cache_dir,
          .python = job.environment.python,
          .program_dir = program.lexically_normal().string(),
          .workers = job.plan.numerics.threads,
          .vocab = job.model.spec.vocab,
          .stopped = {}};
}

}  // namespace

std::unique_ptr<Job> open_job(const Config& config, const CommandLine& line, PlanPurpose purpose,
                              const std::string& run, const std::optional<NumericsPlan>& saved) {
  auto job = std::make_unique<Job>();
  job->config = config;
  job->environment = read_environment();
  job->model = open_model(config, job->environment);
  // The door has chosen: lmlaunch-cuda is started when a GPU computes.
  const bool cpu = !cuda_built() || line.integer("--gpus") == 0 || config.run.device == DeviceChoice::kCpu;
  const DeviceType device = cpu ? DeviceType::kCpu : DeviceType::kCuda;
  const std::string& cache = job->environment.cache_dir;
  check_disks(config);
  std::vector<GpuFacts> gpus;
  if (device == DeviceType::kCuda) gpus.push_back(select_gpu());
  job->machine = survey_machine(gpus);
  job->machine.disks = survey_disks(config, cache, DiskRates::kKnown);
  const std::optional<NumericsPlan> recorded = saved ? saved : recorded_numerics(run, config, device);
  PlanInputs inputs = job->model.inputs(config, device);
  inputs.recorded = recorded ? &*recorded : nullptr;
  const auto plan = [&] { job->plan = make_plan(inputs, job->machine, {}, purpose); };
  // What cannot fit ends here, before anything is started or measured.
  plan();
  const NumericsPlan& numerics = job->plan.numerics;
  const PlacementPlan& placement = job->plan.placement;
  job->stream = start_torch(device, numerics.threads, config.run.deterministic, placement.gemm_shapes);
  const bool training = purpose == PlanPurpose::kTrain, on_disk = placement.on_disk();
  // The time of a step is predicted for training alone; a GPU that works alone has its rates from its name.
  if (training && (cpu || moves_state(placement))) {
    const RateSubject subject{device, numerics.dtype, numerics.threads};
    set_rates(subject, rates_of(*job, subject, job->plan.peak.host), job->machine);
  }
  if (on_disk) job->machine.disks = survey_disks(config, cache, DiskRates::kMeasured);
  if (training || on_disk) plan();
  job->peak_flops = training ? compute_rates(job->machine, device, numerics.dtype).peak_flops : 0;
  return job;
}

std::unique_ptr<Rank> make_rank(const Job& job, bool training, Trace* trace) {
  const int64_t tokens = job.config.train.global_batch * job.config.data.max_length;
  return std::make_unique<Rank>(RankSetup{.spec = job.model.spec,
                                          .layout = job.model.layout,
                                          .adapter = job.model.adapter_spec(),
                                          .optimizer = job.config.optimizer,
                                          .plan = job.plan,
                                          .seed = job.config.run.seed,
                                          .max_length = job.config.data.max_length,
                                          .tokens_per_step = training ? tokens : 0,
                                          .max_grad_norm = job.config.train.max_grad_norm,
                                          .swap_paths = swap_paths(job),
                                          .trace = trace},
                                job.stream);
}

namespace {

void load_base(const Job& job, const LoadSetup& setup, Rank& rank) {
  if (job.config.model.init == ModelInit::kRandom)
    return initialise_weights(setup, job.config.run.seed, rank.weights());
  load_weights(setup, job.model.directory, rank.weights());
}

}  // namespace

void load_rank(const Job& job, Rank& rank, const std::string& trained) {
  const LoadSetup setup{job.model.spec, job.model.layout, job.plan.numerics.dtype, job.stream,
                        job.plan.numerics.threads};
  const bool lora = job.model.adapter.has_value();
  const bool checkpoint = !trained.empty() && fs::exists(fs::path(trained) / kManifestName);
  if (checkpoint) {
    if (lora) load_base(job, setup, rank);
    CheckpointReader reader(trained, job.plan.numerics.threads);
    return rank.restore(reader, 0);
  }
  if (!trained.empty() && !lora) {
    load_weights(setup, trained, rank.weights());
  } else {
    load_base(job, setup, rank);
  }
  if (lora) {
    const std::string adapter = trained.empty() ? job.config.lora.init : trained;
    if (adapter.empty()) {
      initialise_adapter(setup, job.config.run.seed, rank.weights());
    } else {
      load_adapter_weights(setup, adapter, rank.weights());
    }
  }
  rank.weights_ready();
}

JobData open_data(const Job& job, const std::function<bool()>& stopped) {
  const Config& config = job.config;
  JobData data;
  PrepareOptions options = prepare_options(job, config.data.train);
  options.stopped = stopped;
  data.train = prepare_tokens(options);
  data.train_source = std::make_unique<TokenFile>(data.train.path);
  if (!config.data.eval.empty()) {
    options.files = config.data.eval;
    data.eval = prepare_tokens(options);
    data.eval_source = std::make_unique<TokenFile>(data.eval.path);
  }
  data.loader = std::make_unique<Loader>(*data.train_source, data.eval_source.get(),
                                         LoaderOptions{.seed = config.run.seed,
                                                       .max_length = config.data.max_length,
                                                       .too_long = config.data.too_long,
                                                       .packing = config.data.packing,
                                                       .global_batch = config.train.global_batch,
                                                       .micro_batch = job.plan.numerics.micro_batch,
                                                       .vocab = job.model.spec.vocab,
                                                       .eval_fraction = config.data.eval_fraction,
                                                       .text = data.train.text,
                                                       .eval_text = data.eval.text});
  return data;
}

Subject open_subject(const std::string& path) {
  const std::string run = run_of(path);
  Subject subject;
  if (run.empty()) {
    subject.config.model.path = path;
    return subject;
  }
  const bool checkpoint = run != path;
  subject = {.config = load_config(run + "/config.toml"), .trained = path, .checkpoint = true, .run = run};
  if (checkpoint) return subject;
  subject.trained = path + "/model";
  subject.checkpoint = false;
  if (fs::is_directory(subject.trained)) return subject;
  for (const FoundCheckpoint& found : find_checkpoints(path + "/checkpoints")) {
    if (!found.manifest) continue;
    log_note("CKPT-14", "this run has no trained model yet: taking its newest checkpoint, " + found.path);
    subject.trained = found.path;
    subject.checkpoint = true;
    return subject;
  }
  throw Error(Exit::kIncompatible, {.area = "RUN-14",
                                    .what = "this run has no trained model yet, and no checkpoint",
                                    .place = subject.trained,
                                    .next = "let the run finish: lmlaunch " + path + "/config.toml",
                                    .kept = ""});
}

}  // namespace lm
