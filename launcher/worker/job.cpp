#include "launcher/worker/job.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <utility>

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
#include "launcher/machine/rates.h"
#include "launcher/machine/survey.h"
#include "launcher/model_place.h"
#include "launcher/recorded.h"
#include "offload/copy_probe.h"
#include "plan/limits.h"
#include "plan/unit_pools.h"
#include "train/metrics.h"
#include "weights/adapter_files.h"
#include "weights/file_types.h"
#include "weights/load_store.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

// The first GPU in CUDA's enumeration. NVML is asked first, because our own context takes free memory.
GpuFacts select_gpu() {
  const GpuSurvey survey = survey_gpus();
  std::string reason;
  if (cuda_device_count(&reason) == 0) {
    const std::optional<std::string> list = read_cuda_variables().visible_devices;
    throw Error(Exit::kDoesNotFit, {.area = "GPU-34",
                                    .what = "CUDA shows no GPU" + (reason.empty() ? "" : ": " + reason),
                                    .place = list ? "CUDA_VISIBLE_DEVICES=\"" + *list + "\"" : "",
                                    .next = "`lmlaunch doctor` has details; --gpus 0 uses the CPU"});
  }
  const ComputingGpu gpu = computing_gpu(survey, cuda_device(0));
  const Gpu known = gpu_of(gpu.facts.name, gpu.facts.figures);
  require_gpu_code(known);
  log_line("computing on " + known.name + " (" + gpu.facts.uuid + "), compute capability " +
           known.capability.text());
  if (!gpu.note.empty()) log_note("GPU-34", gpu.note);
  return gpu.facts;
}

// Measures the machine's rates, in half a second. `planned`: the run's host memory.
void measure_rates(const RateSubject& subject, StreamView stream, int64_t planned, Machine& machine) {
  if (subject.device == DeviceType::kCpu) {
    machine.library_bytes = resident_bytes();  // memory that a probe frees is used again
    const GemmRate gemm = measure_gemm_rate(subject.dtype, stream);
    gemm_flops(machine, subject.dtype) = gemm.ceiling;
    machine.gemm_sustained = gemm.sustained / gemm.ceiling;
    const DType other = subject.dtype == DType::kBF16 ? DType::kF32 : DType::kBF16;
    machine.fastest_flops = std::max(gemm.ceiling, measure_gemm_rate(other, stream).ceiling);
    const CpuRates cpu = measure_cpu_rates(subject.dtype, stream, gemm.sustained);
    machine.attention_flops = cpu.attention_flops;
    machine.gemm_call_seconds = cpu.gemm_call_seconds;
    machine.decode_bandwidth = cpu.decode_bandwidth;
  } else {
    machine.gpus.front().link_bandwidth = probe_copies(subject.device).each_way();
  }
  // The probe copies from one half of its memory to the other, and must not become the run's peak.
  const int64_t bytes = std::clamp<int64_t>(planned / 16, 8 * kMiB, 128 * kMiB);
  machine.memory_bandwidth = probe_host_memory(stream.threads, bytes);
}

bool moves_state(const PlacementPlan& placement) {
  return placement.update_on_host || std::any_of(placement.pools.begin(), placement.pools.end(),
                                                 [](const PoolPlan& pool) { return pool.slots > 0; });
}

// Striped by measured bandwidth; equally if one path was not measured. If there are several, free space
// limits the share of each.
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

// Warns if the machine has few cores or little memory for each rank.
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

// The GPU with the least memory among all ranks decides what each rank may use. `mine`: this rank's GPU.
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

// Ranks that share a machine run on the cores of their GPU's NUMA node. (A single rank keeps all cores: its
// updates on the host need cores more than near memory.) The machine's cores have been counted before.
void settle_beside(const GpuFacts& gpu) {
  const std::optional<NumaNode> node = node_of_device(gpu.pci_address);
  if (!node) return;
  const std::string where = fmt::format("NUMA node {}, that of its GPU", node->number);
  if (settle_on(*node)) {
    log_line("on " + where + ": cores " + node->core_list);
  } else {
    log_warning("RANK-16", "this rank may use none of the cores " + node->core_list + " of " + where +
                               ": copies to it cross NUMA nodes; bind ranks to their GPU's node, or to "
                               "nothing (mpirun --bind-to none)");
  }
}

// Parameters of open_job's steps.
struct Opening {
  const Config& config;
  PlanPurpose purpose;
  DeviceType device;
  Environment environment;
  Ranks& ranks;

  bool trains() const { return purpose == PlanPurpose::kTrain; }
};

// Inputs of the plan: first those of this rank, then the same on all ranks.
struct Found {
  PlannedModel model;
  std::vector<GpuFacts> gpus;  // the GPU of this rank; empty on the CPU
  Machine machine;
  std::optional<NumericsPlan> recorded;
};

// 1. Inputs of this rank. Nothing is started yet.
Found resolve(const Opening& at, const std::string& run, const std::optional<NumericsPlan>& saved) {
  Found out;
  together(at.ranks.group(), "opening the model", [&] {
    out.model = open_model(at.config, at.environment);
    if (at.trains())
      share_experts(out.model.inputs(at.config, at.device), {.ranks = at.ranks.count()},
                    at.ranks.group().rank(), out.model);
    stand_in(at.config, at.environment, out.model);
    if (out.model.grown && at.ranks.leads()) log_line(describe(*out.model.grown, out.model.spec));
    if (at.trains()) require_trainable(at.config, out.model);
    check_disks(at.config, at.purpose);
    if (at.device == DeviceType::kCuda) out.gpus.push_back(select_gpu());
    out.machine = survey_machine(out.gpus);
    out.machine.libraries = library_versions(at.device);
    out.machine.disks = survey_disks(at.config, at.environment.cache_dir, DiskRates::kCached);
    out.recorded = saved ? saved : recorded_numerics(run, at.config, out.model.spec, at.device);
  });
  return out;
}

// Compares what several ranks must have in common before they plan.
void meet(const Opening& at, Found& found) {
  Ranks& ranks = at.ranks;
  const bool cpu = at.device == DeviceType::kCpu;
  found.machine.cores = ranks.machine_cores(found.machine.cores);
  if (ranks.leads()) warn_of_little(found.machine, ranks.on_machine());
  ranks.agree("configuration", print_config(at.config), "give all machines the same file");
  ranks.agree("device", cpu ? "cpu" : "cuda",
              "set run.device = \"cpu\", or leave machines without a GPU out");
  // Each rank updates all trained weights, so matrix products must have the same bits on all ranks.
  if (at.trains() && is_muon(at.config.optimizer.name))
    ranks.agree(cpu ? "kind of CPU" : "kind of GPU", cpu ? found.machine.cpu_model : found.gpus.front().name,
                "with this optimizer.name use machines of one kind");
  if (may_share_frozen(found.model.inputs(at.config, at.device), at.purpose)) ranks.share_memory();
  if (cpu) return;
  refuse_shared_gpu(ranks.group(), found.gpus.front().uuid);
  if (ranks.on_machine() > 1) settle_beside(found.gpus.front());
}

Machine leaders_machine(Ranks& ranks, const Machine& mine) {
  return parse_machine(ranks.from_leader("machine", [&] { return machine_json(mine); }));
}

// 2. Inputs that all ranks plan with: rank 0's machine, the least GPU memory of all ranks, and the numerics
// that the run has recorded.
Found agree(const Opening& at, Found found) {
  Ranks& ranks = at.ranks;
  if (ranks.count() > 1) meet(at, found);
  if (at.trains()) {
    if (ranks.leads()) {
      warn_of_length(at.config, found.model.spec);
      note_dropouts(found.model);
    }
    const int64_t cores = share_of_machine(found.machine, ranks.on_machine()).cores;
    const RateSubject subject = rate_subject(at.config, found.recorded, cores, at.device);
    take_cached_rates(subject, at.environment.cache_dir, found.machine);
  }
  if (ranks.count() == 1) return found;
  const Machine mine = std::exchange(found.machine, leaders_machine(ranks, found.machine));
  const std::string numerics =
      ranks.from_leader("numerics", [&] { return found.recorded ? numerics_json(*found.recorded) : ""; });
  found.recorded.reset();
  if (!numerics.empty()) found.recorded = parse_numerics(numerics, "rank 0's numerics");
  if (!mine.gpus.empty()) take_least_gpu(ranks.group(), mine.gpus.front(), found.machine.gpus.front());
  return found;
}

// 3. The plan with the rates that are known. A run that does not fit ends here, before anything is started or
// measured.
Plan draft(const Opening& at, const Found& found) {
  PlanInputs inputs = found.model.inputs(at.config, at.device);
  inputs.recorded = found.recorded ? &*found.recorded : nullptr;
  const int count = at.ranks.count(), here = at.ranks.on_machine();
  const World world{.ranks = count,
                    .nodes = count % here == 0 ? count / here : 1,
                    .by_machine = at.ranks.by_machine(),
                    .share_memory = at.ranks.machine_memory() != nullptr};
  Plan plan;
  together(at.ranks.group(), "the plan",
           [&] { plan = make_plan(inputs, share_of_machine(found.machine, here), world, at.purpose); });
  return plan;
}

// 4. The machine with the rates that the drafted plan needs: rank 0's, from the cache or measured. Step time
// is estimated for training only. A GPU without offloading has its rates from its name.
Machine measure(const Opening& at, const Found& found, const Plan& draft, StreamView stream) {
  Machine out = found.machine;
  const std::string& cache = at.environment.cache_dir;
  const bool estimated = at.trains() && (at.device == DeviceType::kCpu || moves_state(draft.placement));
  if (estimated && at.ranks.leads()) {
    const RateSubject subject{at.device, draft.numerics.dtype, draft.numerics.threads};
    if (!take_cached_rates(subject, cache, out)) {
      measure_rates(subject, stream, draft.peak.host, out);
      keep_rates(subject, out, cache);
    }
  }
  if (draft.placement.on_disk() && at.ranks.leads())
    out.disks = survey_disks(at.config, cache, DiskRates::kMeasured);
  return at.ranks.count() > 1 ? leaders_machine(at.ranks, out) : out;
}

// 5. The plan with those rates. All ranks must have the same.
Plan commit(const Opening& at, const Found& found, const Plan& drafted) {
  const bool again = at.trains() || drafted.placement.on_disk();  // else no rate matters
  Plan plan = again ? draft(at, found) : drafted;
  if (at.ranks.count() > 1)
    at.ranks.agree("plan", plan_json(plan), "see that all machines run the same lmlaunch");
  return plan;
}

}  // namespace

PlanInputs plan_inputs(const Job& job) {
  PlanInputs out = job.model.inputs(job.config, job.stream.device);
  out.data = job.data;
  return out;
}

std::unique_ptr<Job> open_job(const Config& config, const CommandLine& line, PlanPurpose purpose,
                              const std::string& run, const std::optional<NumericsPlan>& saved,
                              Ranks* ranks) {
  Ranks alone;
  // The CLI has chosen the device: it starts lmlaunch-cuda if a GPU computes.
  const bool cpu = !cuda_built() || line.integer("--gpus") == 0 || config.run.device == DeviceChoice::kCpu;
  const Opening at{config, purpose, cpu ? DeviceType::kCpu : DeviceType::kCuda, read_environment(),
                   ranks != nullptr ? *ranks : alone};
  Found found = agree(at, resolve(at, run, saved));
  const Plan drafted = draft(at, found);
  // With the draft's threads and GEMM shapes; rates are measured on this stream.
  const StreamView stream =
      start_torch(at.device, drafted.numerics.threads, config.run.deterministic, drafted.gemm_shapes);
  allow_tf32(drafted.numerics.products == Products::kTF32);
  found.machine = measure(at, found, drafted, stream);
  Plan plan = commit(at, found, drafted);
  return std::make_unique<Job>(Job{
      .config = config,
      .run = run,
      .environment = at.environment,
      .model = std::move(found.model),
      .machine = found.machine,
      .plan = plan,
      .ranks_on_machine = at.ranks.on_machine(),
      .peak_flops = at.trains()
                        ? compute_rates(found.machine, at.device, plan.numerics.dtype, plan.numerics.products)
                              .peak_flops
                        : 0,
      .stream = stream});
}

namespace {

const Objective& objective_of(const Job& job) {
  if (job.config.train.objective == ObjectiveChoice::kReward) return objectives::reward;
  if (!job.model.spec.scores()) return objectives::cross_entropy;
  switch (job.model.spec.score.problem) {
    case LabelProblem::kSingleLabel:
      return objectives::single_label;
    case LabelProblem::kMultiLabel:
      return objectives::multi_label;
    case LabelProblem::kRegression:
      return objectives::regression;
    case LabelProblem::kAuto:
      break;
  }
  return objectives::cross_entropy;
}

}  // namespace

PrincipalPairs principal_pairs(const Job& job, DType dtype) {
  const bool drawn = job.config.model.init == ModelInit::kRandom;
  return {{.directory = drawn ? "" : job.model.directory,
           .seed = static_cast<uint64_t>(job.config.run.seed),
           .dtype = dtype,
           .threads = job.plan.numerics.threads},
          *job.model.adapter};
}

std::unique_ptr<Rank> make_rank(const Job& job, bool training, Trace* trace, Ranks* ranks) {
  const int64_t tokens = job.config.train.global_batch * job.config.data.max_length;
  Group* const device_group = ranks == nullptr ? nullptr : &ranks->device_group(job.stream.device);
  return std::make_unique<Rank>(
      RankSetup{.spec = job.model.spec,
                .layout = job.model.layout,
                .adapter = job.model.adapter_spec(),
                .optimizer = job.config.optimizer,
                .plan = job.plan,
                .seed = job.config.run.seed,
                .max_length = job.config.data.max_length,
                .tokens_per_step = training ? tokens : 0,
                .max_grad_norm = job.config.train.max_grad_norm,
                .router_aux_loss = router_aux_loss(job.config.train, job.model.spec),
                .swap_paths = swap_paths(job),
                .group = ranks == nullptr ? nullptr : &ranks->group(),
                .device_group = device_group,
                .machine_memory = ranks == nullptr ? nullptr : ranks->machine_memory(),
                .trace = trace,
                .objective = objective_of(job)},
      job.stream);
}

namespace {

// `fresh`: adapters begin as these, too.
void load_starts(const Job& job, const LoadSetup& setup, bool fresh, Rank& rank) {
  if (!job.model.adapter || !job.model.adapter->pissa) return;
  if (fresh)
    log_line("lora.start = \"pissa\": initializing the adapters with the principal parts of their matrices");
  place_starts(setup, principal_pairs(job, setup.dtype), fresh, rank.weights());
}

// Tells of tensors whose bits the run's type does not hold, where the model is in that type but for them. (Of
// a model that is in another type altogether, model.dtype has said so.)
void note_rounded(const Job& job, DType dtype) {
  const ModelFiles files(job.model.directory);
  const FileTypes types = file_types(files, job.model.layout);
  const std::vector<std::string> rounded = rounded_tensors(files, types.others, dtype);
  if (rounded.empty()) return;
  log_note(
      "FILE-23",
      fmt::format("{} of the model's tensors, {} the first, {} more bits in the files than {} "
                  "holds: the run computes with rounded values; model.dtype = \"fp32\" does not",
                  rounded.size(), rounded.front(), rounded.size() == 1 ? "has" : "have", dtype_name(dtype)));
}

void load_base(const Job& job, const LoadSetup& setup, Rank& rank) {
  if (job.config.model.init == ModelInit::kRandom)
    return initialise_weights(setup, job.config.run.seed, rank.weights());
  load_weights(setup, job.model.directory, rank.weights());
  if (rank.training() && rank.group().rank() == 0) note_rounded(job, setup.dtype);
  if (job.model.spec.score.fresh && !job.model.adapter)
    initialise_head(setup, job.config.run.seed, rank.weights());
}

void start_adapter(const Job& job, const LoadSetup& setup, Rank& rank) {
  const int64_t seed = job.config.run.seed;
  const std::string base = job.config.model.init == ModelInit::kRandom ? "" : job.model.directory;
  const AdapterSpec& adapter = *job.model.adapter;
  const bool loftq = job.config.lora.start == LoraStart::kLoftq;
  if (loftq) log_line("lora.start = \"loftq\": initializing the adapters with the quantization error");
  if (job.config.prompt.start != PromptStart::kNormal) {
    start_virtual_tokens(setup, seed, base, rank.weights());
  } else if (adapter.kind == AdapterKind::kNorms) {
    copy_replaced(setup, seed, base, rank.weights());
  } else if (adapter.pissa) {
    LoadSetup model = setup;
    model.dtype = job.plan.numerics.dtype;
    load_starts(job, model, true, rank);
  } else if (loftq || adapter.dora) {
    initialise_adapter(setup, seed, rank.weights());  // the head's, which is not quantized
    initialise_from_base(setup, seed, {.directory = base, .dtype = job.plan.numerics.dtype, .loftq = loftq},
                         adapter, rank.weights());
  } else {
    initialise_adapter(setup, seed, rank.weights());
  }
  if (adapter.bias != AdapterBias::kNone) copy_replaced(setup, seed, base, rank.weights());
  start_whole_tensors(setup, seed, base, rank.weights());
  start_token_rows(setup, seed, base, adapter.tokens, rank.weights());
}

void load_all(const Job& job, Rank& rank, const std::string& trained) {
  const LoadSetup setup{job.model.spec, job.model.layout, job.plan.numerics.dtype, job.stream,
                        job.plan.numerics.threads};
  LoadSetup adapters = setup;
  adapters.dtype = job.plan.numerics.trained_dtype();
  if (job.config.model.init != ModelInit::kRandom) adapters.base = job.model.directory;
  const bool lora = job.model.adapter.has_value();
  const bool checkpoint = !trained.empty() && fs::exists(fs::path(trained) / kManifestName);
  if (checkpoint) {
    if (job.model.layout.frozen_elements > 0) load_base(job, setup, rank);
    load_starts(job, setup, false, rank);
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

}  // namespace

void load_rank(const Job& job, Rank& rank, const std::string& trained) {
  load_all(job, rank, trained);
  rank.frozen_ready();
}

}  // namespace lm
