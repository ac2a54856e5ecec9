#include "launcher/rank/job.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <optional>

#include "base/bytes.h"
#include "base/cuda.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/process.h"
#include "checkpoint/restore.h"
#include "config/config_print.h"
#include "config/config_text.h"
#include "config/config_toml.h"
#include "data/template_date.h"
#include "kernels/cpu_rates.h"
#include "kernels/gemm_rate.h"
#include "kernels/runtime.h"
#include "launcher/environment.h"
#include "launcher/machine/disk_survey.h"
#include "launcher/machine/machine_survey.h"
#include "launcher/machine/numa.h"
#include "launcher/machine/survey.h"
#include "launcher/model_place.h"
#include "launcher/recorded.h"
#include "offload/copy_probe.h"
#include "train/metrics.h"
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
                                    .next = "`lmlaunch doctor` tells more; --gpus 0 uses the CPU"});
  }
  const ComputingGpu gpu = computing_gpu(survey, cuda_device(0));
  const Gpu known = gpu_of(gpu.facts.name, gpu.facts.figures);
  require_gpu_code(known);
  log_line("computing on " + known.name + " (" + gpu.facts.uuid + "), compute capability " +
           known.capability.text());
  if (!gpu.note.empty()) log_note("GPU-34", gpu.note);
  return gpu.facts;
}

// `planned`: the run's host memory. Half a second.
MeasuredRates measure_rates(const RateSubject& subject, StreamView stream, int64_t planned) {
  MeasuredRates rates;
  if (subject.device == DeviceType::kCpu) {
    rates.library_bytes = resident_bytes();  // what a probe leaves is used again
    const GemmRate gemm = measure_gemm_rate(subject.dtype, stream);
    rates.gemm_flops = gemm.ceiling;
    rates.gemm_sustained = gemm.sustained / gemm.ceiling;
    const DType other = subject.dtype == DType::kF32 ? DType::kBF16 : DType::kF32;
    rates.fastest_flops = std::max(gemm.ceiling, measure_gemm_rate(other, stream).ceiling);
    const CpuRates cpu = measure_cpu_rates(subject.dtype, stream, gemm.sustained);
    rates.attention_flops = cpu.attention_flops;
    rates.gemm_call_seconds = cpu.gemm_call_seconds;
    rates.decode_bandwidth = cpu.decode_bandwidth;
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
    const int64_t room = path_room(job.config.offload, disk) / job.ranks_on_machine;
    if (room > 0 && (disks.size() > 1 || job.config.offload.disk_limit)) paths.back().limit = room;
  }
  return paths;
}

}  // namespace

namespace {

// A run of many processes is slow, or does not fit, on a machine that has little for each.
void warn_of_little(const Machine& machine, int ranks) {
  constexpr int64_t kLittleMemory = kGiB;
  const auto online = static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  const std::string these =
      fmt::format("{} ranks share {}{}", ranks, machine.cores, machine.cores == 1 ? " core" : " cores");
  if (ranks > machine.cores) {
    log_warning("RANK-16",
                these + ": each step waits for its slowest rank; start at most one rank per core" +
                    (online > machine.cores ? fmt::format(", or let them use more of this machine's {} "
                                                          "(mpirun --bind-to none, srun --cpus-per-task)",
                                                          online)
                                            : ""));
  } else if (online > machine.cores && machine.cores == ranks) {
    log_note(
        "RANK-16",
        fmt::format("{} of this machine's {}; mpirun --bind-to none or srun --cpus-per-task gives them more",
                    these, online));
  }
  if (const int64_t memory = machine.host_capacity(); memory > 0 && memory / ranks < kLittleMemory) {
    log_warning("RANK-16", fmt::format("{} ranks share {} of memory, less than 1 GiB each; start fewer",
                                       ranks, format_bytes(memory)));
  }
}

// What all ranks plan with: the leader's machine, and the numerics that the run has recorded.
void adopt_leader(Ranks& ranks, Machine& machine, std::optional<NumericsPlan>& recorded) {
  machine = parse_machine(ranks.from_leader("machine", [&] { return machine_json(machine); }));
  const std::string numerics =
      ranks.from_leader("numerics", [&] { return recorded ? numerics_json(*recorded) : ""; });
  if (!numerics.empty()) recorded = parse_numerics(numerics, "the first rank's numerics");
  if (numerics.empty()) recorded.reset();
}

// Of all ranks' GPUs the one with the least room decides what each may take of its own. `mine`: this rank's.
void take_least_gpu(Group& group, const Gpu& mine, Gpu& planned) {
  struct Room {
    int64_t memory, free;
  };
  for (const Room& room : group.gather("memory of GPUs", Room{mine.memory_bytes, mine.free_bytes})) {
    planned.memory_bytes = std::min(planned.memory_bytes, room.memory);
    planned.free_bytes = std::min(planned.free_bytes, room.free);
  }
}

// NCCL refuses two ranks on one GPU, and each would have planned with all of its memory.
void refuse_shared_gpu(Group& group, const std::string& uuid) {
  struct Card {
    char uuid[96] = "";
  };
  Card mine;
  uuid.copy(mine.uuid, sizeof mine.uuid - 1);
  const std::vector<Card> all = group.gather("GPUs", mine);
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = i + 1; j < all.size(); ++j) {
      if (all[i].uuid[0] == 0 || std::string(all[i].uuid) != all[j].uuid) continue;
      throw Error(Exit::kDoesNotFit,
                  {.area = "DEV-34",
                   .what = fmt::format("ranks {} and {} were given the same GPU", i, j),
                   .place = all[i].uuid,
                   .next = "start one process per GPU, or train on the CPU with --gpus 0"});
    }
  }
}

// Ranks that share a machine stay beside their GPUs. (One alone keeps all cores: what it updates on the host
// needs them more than it needs near memory.) The machine's cores have been counted before.
void settle_beside(const GpuFacts& gpu) {
  const std::optional<NumaNode> node = node_of_device(gpu.pci_address);
  if (!node) return;
  const std::string where = fmt::format("NUMA node {}, that of its GPU", node->number);
  if (settle_on(*node)) {
    log_line("on " + where + ": cores " + node->core_list);
  } else {
    log_warning("RANK-16", "this rank may use none of the cores " + node->core_list + " of " + where +
                               ": bytes to it cross the machine; bind ranks to their GPU's node, or to "
                               "nothing (mpirun --bind-to none)");
  }
}

// What several ranks must have alike, before they plan.
void meet(const Config& config, PlanPurpose purpose, bool cpu, const std::vector<GpuFacts>& gpus,
          Ranks& ranks, Job& job) {
  job.ranks_on_machine = ranks.on_machine();
  job.machine.cores = ranks.machine_cores(job.machine.cores);
  if (ranks.leads()) warn_of_little(job.machine, job.ranks_on_machine);
  ranks.agree("configuration", print_config(config), "give all machines the same file");
  ranks.agree("device", cpu ? "cpu" : "cuda",
              "set run.device = \"cpu\", or leave machines without a GPU out");
  // Each rank updates all of what is trained: products must have the same bits on all of them.
  if (purpose == PlanPurpose::kTrain && is_orthogonal(config.optimizer.name))
    ranks.agree(cpu ? "kind of CPU" : "kind of GPU", cpu ? job.machine.cpu_model : gpus.front().name,
                "with this optimizer.name use machines of one kind");
  if (!gpus.empty()) refuse_shared_gpu(ranks.group(), gpus.front().uuid);
  if (!gpus.empty() && job.ranks_on_machine > 1) settle_beside(gpus.front());
}

}  // namespace

PlanInputs plan_inputs(const Job& job) {
  PlanInputs out = job.model.inputs(job.config, job.stream.device);
  out.data = job.data;
  return out;
}

RateSubject rate_subject(const Job& job) {
  return {job.stream.device, job.plan.numerics.dtype, job.plan.numerics.threads};
}

std::unique_ptr<Job> open_job(const Config& config, const CommandLine& line, PlanPurpose purpose,
                              const std::string& run, const std::optional<NumericsPlan>& saved,
                              Ranks* ranks) {
  auto job = std::make_unique<Job>();
  const int count = ranks == nullptr ? 1 : ranks->count();
  // What all of several ranks refuse, one of them says.
  const auto on_all = [&](const char* what, const std::function<void()>& work) {
    count > 1 ? together(ranks->group(), what, work) : work();
  };
  job->config = config;
  job->run = run;
  job->environment = read_environment();
  // The door has chosen: lmlaunch-cuda is started when a GPU computes.
  const bool cpu = !cuda_built() || line.integer("--gpus") == 0 || config.run.device == DeviceChoice::kCpu;
  const DeviceType device = cpu ? DeviceType::kCpu : DeviceType::kCuda;
  const std::string& cache = job->environment.cache_dir;
  std::vector<GpuFacts> gpus;
  std::optional<NumericsPlan> recorded;
  on_all("opening the model", [&] {
    job->model = open_model(config, job->environment);
    check_disks(config, purpose);
    if (device == DeviceType::kCuda) gpus.push_back(select_gpu());
    job->machine = survey_machine(gpus);
    job->machine.libraries = library_versions(device);
    job->machine.disks = survey_disks(config, cache, DiskRates::kKnown);
    recorded = saved ? saved : recorded_numerics(run, config, job->model.spec.names, device);
  });
  if (count > 1) meet(config, purpose, cpu, gpus, *ranks, *job);
  const bool training = purpose == PlanPurpose::kTrain;
  if (training && (count == 1 || ranks->leads())) warn_of_length(config, job->model.spec);
  if (training) {
    const int64_t cores = share_of_machine(job->machine, job->ranks_on_machine).cores;
    set_known_rates(rate_subject(config, recorded, cores, device), cache, job->machine);
  }
  if (count > 1) {
    const std::vector<Gpu> mine = job->machine.gpus;
    adopt_leader(*ranks, job->machine, recorded);
    if (!mine.empty()) take_least_gpu(ranks->group(), mine.front(), job->machine.gpus.front());
  }
  PlanInputs inputs = job->model.inputs(config, device);
  inputs.recorded = recorded ? &*recorded : nullptr;
  const auto plan = [&] {
    const int here = job->ranks_on_machine;
    const World world{.ranks = count,
                      .nodes = count % here == 0 ? count / here : 1,
                      .by_machine = ranks == nullptr || ranks->by_machine()};
    job->plan = make_plan(inputs, share_of_machine(job->machine, here), world, purpose);
  };
  // What cannot fit ends here, before anything is started or measured.
  on_all("the plan", plan);
  const NumericsPlan& numerics = job->plan.numerics;
  const PlacementPlan& placement = job->plan.placement;
  job->stream = start_torch(device, numerics.threads, config.run.deterministic, placement.gemm_shapes);
  const bool on_disk = placement.on_disk();
  // The time of a step is predicted for training alone; a GPU that works alone has its rates from its name.
  if (training && (cpu || moves_state(placement))) {
    const RateSubject subject = rate_subject(*job);
    if (count == 1 || ranks->leads())
      set_rates(subject, rates_of(*job, subject, job->plan.peak.host), job->machine);
  }
  if (on_disk && (count == 1 || ranks->leads()))
    job->machine.disks = survey_disks(config, cache, DiskRates::kMeasured);
  if (count > 1) adopt_leader(*ranks, job->machine, recorded);
  if (training || on_disk) on_all("the plan", plan);
  if (count > 1) ranks->agree("plan", plan_json(job->plan), "see that all machines run the same lmlaunch");
  job->peak_flops = training ? compute_rates(job->machine, device, numerics.dtype).peak_flops : 0;
  return job;
}

std::unique_ptr<Rank> make_rank(const Job& job, bool training, Trace* trace, Ranks* ranks) {
  const int64_t tokens = job.config.train.global_batch * job.config.data.max_length;
  Group* const device_group = ranks == nullptr ? nullptr : &ranks->device_group(job.stream.device);
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
                                          .group = ranks == nullptr ? nullptr : &ranks->group(),
                                          .device_group = device_group,
                                          .trace = trace},
                                job.stream);
}

namespace {

void load_base(const Job& job, const LoadSetup& setup, Rank& rank) {
  if (job.config.model.init == ModelInit::kRandom)
    return initialise_weights(setup, job.config.run.seed, rank.weights());
  load_weights(setup, job.model.directory, rank.weights());
}

void start_adapter(const Job& job, const LoadSetup& setup, Rank& rank) {
  const int64_t seed = job.config.run.seed;
  if (job.config.lora.start == LoraStart::kZero) return initialise_adapter(setup, seed, rank.weights());
  const bool drawn = job.config.model.init == ModelInit::kRandom;
  log_line("lora.start = \"loftq\": adapters begin with what quantising lost");
  initialise_loftq(setup, seed, {drawn ? "" : job.model.directory, job.plan.numerics.dtype},
                   job.model.adapter->scale(), rank.weights());
}

}  // namespace

void load_rank(const Job& job, Rank& rank, const std::string& trained) {
  const LoadSetup setup{job.model.spec, job.model.layout, job.plan.numerics.dtype, job.stream,
                        job.plan.numerics.threads};
  LoadSetup adapters = setup;
  adapters.dtype = job.plan.numerics.trained_dtype();
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
      start_adapter(job, adapters, rank);
    } else {
      load_adapter_weights(adapters, adapter, rank.weights());
    }
  }
  rank.weights_ready();
}

namespace {

// A configuration must name data to train on, and a model's directory has none.
Config config_of_model(const std::string& path, const std::vector<std::string>& overrides) {
  constexpr const char* kNoData = "none";
  Config config = parse_config(
      "[model]\npath = " + value_text(path) + "\n[data]\ntrain = [\"" + kNoData + "\"]\n", path, overrides);
  if (config.data.train == std::vector<std::string>{kNoData}) config.data.train.clear();
  return config;
}

// A PEFT adapter names the model that it is for.
void open_adapter(const std::string& path, Subject& subject) {
  subject.config.train.method = Method::kLora;
  subject.trained = path;
  settle_model(subject.config, read_environment());
}

}  // namespace

Subject open_subject(const std::string& place, const std::vector<std::string>& overrides) {
  const std::string adapter = model_directory(place, read_environment());
  const std::string path = run_of(place).empty() && holds_adapter(adapter) ? adapter : place;
  const std::string run = run_of(path);
  Subject subject;
  if (run.empty()) {
    subject.config = config_of_model(path, overrides);
    if (holds_adapter(path)) open_adapter(path, subject);
    return subject;
  }
  subject = {.config = load_config(run + "/config.toml", overrides), .trained = path, .run = run};
  subject.checkpoint = fs::exists(fs::path(path) / kManifestName);
  if (run != path) return subject;
  subject.trained = path + "/model";
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
                                    .next = "let the run finish: lmlaunch " + path + "/config.toml"});
}

}  // namespace lm
