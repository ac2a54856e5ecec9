#include <fmt/format.h>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "config/config_toml.h"
#include "launcher/built_in_models.h"
#include "launcher/cached_data.h"
#include "launcher/cli/commands.h"
#include "launcher/cli/device_choice.h"
#include "launcher/cli/fetch.h"
#include "launcher/cli/imagined_gpu.h"
#include "launcher/cli/planned_machine.h"
#include "launcher/cli/run_directory.h"
#include "launcher/machine/disk_survey.h"
#include "launcher/machine/machine_survey.h"
#include "launcher/machine/rates.h"
#include "launcher/model_place.h"
#include "launcher/planned_model.h"
#include "launcher/recorded.h"
#include "plan/alternatives.h"
#include "plan/scaling.h"
#include "plan/upgrades.h"

namespace lm {
namespace {

using Object = nlohmann::ordered_json;

bool plan_for_gpu(const CommandLine& line, DeviceChoice configured, const SurveyedGpus& found,
                  const PlannedMachine& planned) {
  DeviceFacts facts{.gpus = static_cast<int>(found.survey.cards.size()),
                    .visible = static_cast<int>(found.visible.gpus.size()),
                    .hidden_by = found.cuda.visible_devices.value_or(""),
                    .cuda_program = true};
  if (!planned.file.empty()) {
    const auto gpus = static_cast<int>(planned.machine.gpus.size());
    facts = {.gpus = gpus, .visible = gpus, .cuda_program = true, .file = planned.file};
  }
  // An imagined GPU counts as present.
  if (imagines_gpus(line)) facts.gpus = facts.visible = 1;
  const DeviceDecision decision = decide_device(line, configured, facts);
  if (!decision.note.empty()) log_note("DEV-34", decision.note);
  const bool gpu = decision.cuda;
  if (imagined_gpu(line) && !gpu) {
    throw usage_error("the command line imagines a GPU, but the run uses the CPU",
                      "leave out --gpus 0, or set run.device = \"cuda\"");
  }
  return gpu;
}

// A run asks CUDA; the CLI has only NVML.
void require_gpu_memory(const Gpu& gpu, const SurveyedGpus& found) {
  if (gpu.memory_bytes > 0) return;
  const GpuFacts& facts = found.visible.gpus.front();
  const std::string name = !facts.name.empty() ? facts.name : !facts.uuid.empty() ? facts.uuid : "the GPU";
  const std::string& problem = found.survey.problem;
  throw Error(Exit::kDoesNotFit, {.area = "GPU-34",
                                  .what = "the memory of " + name + " is unknown before a run" +
                                          (problem.empty() ? "" : ": " + problem),
                                  .place = "",
                                  .next = (problem.empty() ? "" : std::string(kMendNvml) + ", or ") +
                                          "--gpu-memory SIZE plans for a GPU of that size"});
}

// The GPU that the plan is for, with its name; an imagined one may have only a size.
Object gpu_object(const CommandLine& line, const PlannedMachine& planned, const SurveyedGpus& found) {
  const Gpu& gpu = planned.machine.gpus.front();
  Object out = {{"memory_bytes", gpu.memory_bytes}};
  if (const auto imagined = imagined_gpu(line)) {
    if (!imagined->name.empty()) out["name"] = gpu.name;
    log_note("GPU-34", "planning for " + assumptions(gpu));
    return out;
  }
  out["name"] = gpu.name;
  if (!planned.file.empty()) {
    if (gpu.capability.known()) out["compute_capability"] = gpu.capability.text();
    return out;
  }
  if (found.visible.gpus.empty()) {  // several GPUs are planned, and none is here
    out["uuid"] = "";
    return out;
  }
  const GpuFacts& facts = found.visible.gpus.front();
  out["uuid"] = facts.uuid;
  if (gpu.capability.known()) out["compute_capability"] = gpu.capability.text();
  if (facts.memory == 0) {
    log_note("GPU-34", found.survey.problem + ": planning with the nominal memory of a " + gpu.name);
  }
  if (found.visible.order_guessed) {
    log_note("DEV-34", "CUDA_DEVICE_ORDER=" + found.cuda.device_order +
                           ": only CUDA knows which GPU it puts first; this plan is for " + gpu.name);
  }
  return out;
}

// Inputs of a plan, as far as the CLI knows them.
struct Question {
  Config config;
  PlannedModel model;
  Machine machine;
  Object gpu;  // null on the CPU
  DeviceType device = DeviceType::kCpu;
  World world;
  std::optional<NumericsPlan> recorded;
  DataShape data;  // row lengths, if an earlier start has tokenized the data
  std::string cache_dir;
  bool imagined = false;             // for another machine than this one
  std::vector<std::string> assumed;  // of the machine

  PlanInputs inputs() const {
    PlanInputs out = model.inputs(config, device);
    out.recorded = recorded ? &*recorded : nullptr;
    out.data = data;
    return out;
  }
  Machine share() const { return share_of_machine(machine, world.ranks_per_node()); }
};

// A preset may be planned by its name, without a file, for an imagined machine with imagined disks.
const Preset* planned_preset(const CommandLine& line) {
  const std::string& path = line.positional[0];
  std::error_code ignored;
  return std::filesystem::exists(path, ignored) ? nullptr : find_preset(path);
}

// `elsewhere`: the configuration is not meant for this machine.
std::unique_ptr<Question> question_about(const Config& config, const std::string& config_path, bool elsewhere,
                                         const CommandLine& line) {
  auto out = std::make_unique<Question>();
  out->config = config;
  const Environment environment = read_environment();
  out->cache_dir = environment.cache_dir;
  out->model = open_model(config, environment, model_shapes());
  require_trainable(config, out->model);
  if (out->model.directory.empty())
    log_note("FILE-21", config.model.path + " was not found locally: planning from its built-in shape");
  warn_of_length(config, out->model.spec);
  note_dropouts(out->model);
  const SurveyedGpus found = survey_visible_gpus();
  PlannedMachine planned = planned_machine(line, found);
  out->world = planned.world;
  // An imagined machine may have the disks of this one, or none that is here.
  out->imagined = planned.imagined || elsewhere;
  if (!out->imagined) check_disks(config, PlanPurpose::kTrain);
  planned.machine.disks = planned.file.empty()
                              ? survey_disks(config, environment.cache_dir, DiskRates::kCached)
                              : disks_of_file(planned, config);
  const bool gpu = plan_for_gpu(line, config.run.device, found, planned);
  const bool here = planned.file.empty() && !imagines_gpus(line);
  if (gpu && here) require_gpu_code(planned.machine.gpus.front());
  if (gpu) require_gpu_memory(planned.machine.gpus.front(), found);
  if (gpu) out->gpu = gpu_object(line, planned, found);
  out->device = gpu ? DeviceType::kCuda : DeviceType::kCpu;
  share_experts(out->model.inputs(config, out->device), out->world, 0, out->model);
  out->assumed = machine_assumptions(planned);
  out->machine = std::move(planned.machine);
  const std::string run = elsewhere ? "" : run_directory(config, config_path);
  if (!elsewhere) out->data = cached_data_shape(config, out->model, environment, run).value_or(DataShape{});
  if (out->imagined) return out;
  // As a start would find them: the run's numerics, and cached rates of an earlier run.
  out->recorded = recorded_numerics(run, config, out->model.spec, out->device);
  const RateSubject subject = rate_subject(config, out->recorded, out->share().cores, out->device);
  take_cached_rates(subject, out->cache_dir, out->machine);
  return out;
}

std::unique_ptr<Question> question_of(const CommandLine& line) {
  const std::string& path = line.positional[0];
  const Preset* const preset = planned_preset(line);
  Config config = preset != nullptr ? parse_config(preset->text, "preset " + preset->name, line.overrides)
                                    : load_config(path, line.overrides);
  // A built-in shape needs no file.
  if (model_is_built_in(config.model.path, model_shapes())) {
    settle_model(config, read_environment());
  } else {
    settle_or_fetch(config, FetchPart::kConfigAlone);
  }
  return question_about(config, path, preset != nullptr, line);
}

// Whoever names or describes machines may choose them. Of others nobody waits for the plans of better ones:
// each takes as long as the first.
bool sizes_machine(const CommandLine& line) {
  return line.has("--gpu") || line.has("--machine") || line.integer("--nodes").value_or(1) > 1;
}

struct Planned {
  Plan plan;
  std::vector<std::string> assumed;
  std::vector<Upgrade> upgrades;
  std::optional<Scaling> scaling;  // with several ranks
  Object gpu;                      // null on the CPU
  std::optional<Error> refusal;    // why it does not fit, and what would
  std::string streamed;            // a line on what data.streaming reads; "": a token cache
  Object data;                     // the same for programs, else null
};

Object data_object(const Config& config, const StreamedFiles& files) {
  if (!config.data.streaming) return nullptr;
  Object out = {{"streaming", true}, {"shuffle_window", config.data.shuffle_window}};
  if (!files.found) return out;
  out["files"] = files.files;
  out["bytes"] = files.bytes;
  return out;
}

Planned plan_of(const CommandLine& line) {
  const std::unique_ptr<Question> question = question_of(line);
  Machine& machine = question->machine;
  const PlanInputs inputs = question->inputs();
  const World& world = question->world;
  const StreamedFiles files = streamed_files(question->config, read_environment());
  const std::string streamed = describe_streamed(question->config, files);
  const Object data = data_object(question->config, files);
  const auto with_plan = [&](Plan plan, std::optional<Error> refusal) {
    Planned out{.plan = std::move(plan),
                .assumed = question->assumed,
                .upgrades = {},
                .scaling = {},
                .gpu = question->gpu,
                .refusal = std::move(refusal),
                .streamed = streamed,
                .data = data};
    for (std::string& sentence : plan_assumptions(inputs, question->share(), out.plan))
      out.assumed.push_back(std::move(sentence));
    if (sizes_machine(line)) out.upgrades = estimate_upgrades(inputs, question->share(), out.plan);
    if (world.ranks > 1) out.scaling = estimate_scaling(inputs, machine, world);
    return out;
  };
  try {
    Plan plan = make_plan(inputs, question->share(), world);
    if (!question->imagined && plan.placement.on_disk()) {
      machine.disks = survey_disks(question->config, question->cache_dir, DiskRates::kMeasured);
      plan = make_plan(inputs, question->share(), world);
    }
    return with_plan(std::move(plan), std::nullopt);
  } catch (const Error& error) {
    if (error.code() != Exit::kDoesNotFit) throw;
    return with_plan(draft_plan(inputs, question->share(), world), error);
  }
}

std::string print_assumptions(const std::vector<std::string>& assumed) {
  std::string out = "assumed\n";
  for (const std::string& sentence : assumed) out += "  " + escape_controls(sentence) + "\n";
  return out;
}

void print_gpu(const Object& gpu) {
  if (!gpu.contains("name")) return;
  const std::string uuid = gpu.value("uuid", "");
  const std::string capability = gpu.value("compute_capability", "");
  std::printf("gpu: %s%s%s\n", escape_controls(gpu["name"].get<std::string>()).c_str(),
              capability.empty() ? "" : (", compute capability " + capability).c_str(),
              uuid.empty() ? "" : escape_controls(" (" + uuid + ")").c_str());
}

void print_object(const Object& object) {
  std::puts(object.dump(2, ' ', false, Object::error_handler_t::replace).c_str());
}

Object refusal_object(const Error& refusal) {
  return {{"fits", false}, {"why", refusal.what()}, {"next", refusal.text().advice()}};
}

// Prints the rows that no other row beats, at most a screenful; --json has all.
Exit compare_command(const CommandLine& line) {
  constexpr size_t kMostRows = 16;
  const std::unique_ptr<Question> question = question_of(line);
  refuse_idle_ranks(question->world, question->config);
  const std::vector<Alternative> all = alternatives(question->inputs(), question->share(), question->world);
  if (line.has("--json")) {
    std::printf("%s\n", alternatives_json(all).c_str());
  } else {
    if (!question->gpu.is_null()) print_gpu(question->gpu);
    const std::vector<Alternative> best = best_alternatives(all);
    std::fputs(print_alternatives(best, kMostRows).c_str(), stdout);
    std::printf(
        "%zu of %zu ways; those that another one beats in speed and precision are left out (--json has "
        "all)\n",
        std::min(kMostRows, best.size()), all.size());
  }
  return !all.empty() && all.front().plan.fits ? Exit::kDone : Exit::kDoesNotFit;
}

}  // namespace

Exit plan_command(const CommandLine& line) {
  if (line.has("--compare")) return compare_command(line);
  try {
    const Planned planned = plan_of(line);
    if (!line.has("--json")) {
      if (planned.refusal && planned.scaling)
        std::fputs(print_scaling(*planned.scaling, planned.plan).c_str(), stdout);
      if (planned.refusal) throw *planned.refusal;
      print_gpu(planned.gpu);
      std::fputs((planned.streamed + print_plan(planned.plan)).c_str(), stdout);
      if (sizes_machine(line)) std::fputs(print_upgrades(planned.plan, planned.upgrades).c_str(), stdout);
      std::fputs(print_assumptions(planned.assumed).c_str(), stdout);
      if (planned.scaling) std::fputs(print_scaling(*planned.scaling, planned.plan).c_str(), stdout);
      return Exit::kDone;
    }
    // The same object whether it fits or not, so that a program can compare machines; a refusal adds its
    // reason.
    Object object = planned.refusal ? refusal_object(*planned.refusal) : Object::object();
    object.update(Object::parse(plan_json(planned.plan)));
    if (planned.refusal) object["fits"] = false;  // a refusal may have other reasons than bytes
    object["assumptions"] = planned.assumed;
    object["upgrades"] = Object::parse(upgrades_json(planned.upgrades));
    if (!planned.gpu.is_null()) object["gpu"] = planned.gpu;
    if (!planned.data.is_null()) object["data"] = planned.data;
    if (planned.scaling) object["scaling"] = Object::parse(scaling_json(*planned.scaling));
    if (planned.scaling) object["notes"] = scaling_notes(planned.plan);
    print_object(object);
    return planned.refusal ? planned.refusal->code() : Exit::kDone;
  } catch (const Error& error) {
    // Nothing to plan with, for example a requested GPU that does not exist.
    if (error.code() != Exit::kDoesNotFit || !line.has("--json")) throw;
    print_object(refusal_object(error));
    return error.code();
  }
}

std::vector<Alternative> ways_to_train(const Config& config, const std::string& config_path,
                                       const CommandLine& line) {
  const std::unique_ptr<Question> question = question_about(config, config_path, false, line);
  return best_alternatives(alternatives(question->inputs(), question->share(), question->world));
}

std::string less_host_memory(const CommandLine& line) {
  try {
    const std::unique_ptr<Question> question = question_of(line);
    return less_memory(question->inputs(), question->share(), question->world, TierId::kHost);
  } catch (const Error& error) {
    // Called after a run has failed, when the machine may have changed: the failure itself is reported in any
    // case.
    if (error.code() == Exit::kInternal) log_warning(error.text().area, error.what());
    return "";
  }
}

}  // namespace lm
