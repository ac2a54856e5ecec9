#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "config/config_toml.h"
#include "launcher/door/commands.h"
#include "launcher/door/device_choice.h"
#include "launcher/door/run_directory.h"
#include "launcher/machine/disk_survey.h"
#include "launcher/machine/machine_survey.h"
#include "launcher/machine/rates.h"
#include "launcher/planned_model.h"
#include "launcher/recorded.h"

namespace lm {
namespace {

using Object = nlohmann::ordered_json;

bool plan_for_gpu(const CommandLine& line, DeviceChoice configured, const SurveyedGpus& found) {
  DeviceFacts facts{.gpus = static_cast<int>(found.survey.cards.size()),
                    .visible = static_cast<int>(found.visible.gpus.size()),
                    .hidden_by = found.cuda.visible_devices.value_or(""),
                    .cuda_program = true};
  // A GPU that is imagined is as good as one that is there.
  if (line.has("--gpu-memory")) facts.gpus = facts.visible = 1;
  const DeviceDecision decision = decide_device(line, configured, facts);
  if (!decision.note.empty()) log_note("DEV-34", decision.note);
  const bool gpu = decision.cuda;
  if (line.has("--gpu-memory") && !gpu) {
    throw Error(Exit::kUsage, {.area = "USE-20",
                               .what = "--gpu-memory plans for a GPU, and the run is to use the CPU",
                               .place = "the command line",
                               .next = "leave out --gpus 0, or set run.device = \"cuda\"",
                               .kept = ""});
  }
  return gpu;
}

// The run asks CUDA; the door has nobody else to ask than NVML.
void require_gpu_memory(const Gpu& gpu, const SurveyedGpus& found) {
  if (gpu.memory_bytes > 0) return;
  const GpuFacts facts = found.visible.gpus.front().facts;
  const std::string name = !facts.name.empty() ? facts.name : !facts.uuid.empty() ? facts.uuid : "the GPU";
  const std::string& problem = found.survey.problem;
  throw Error(Exit::kDoesNotFit, {.area = "GPU-34",
                                  .what = "how much memory " + name + " has is not known before a run" +
                                          (problem.empty() ? "" : ": " + problem),
                                  .place = "",
                                  .next = (problem.empty() ? "" : std::string(kMendNvml) + ", or ") +
                                          "--gpu-memory SIZE plans for a GPU of that size",
                                  .kept = ""});
}

// Which GPU the plan is for, by name; one that is imagined has only a size.
Object gpu_object(const CommandLine& line, const Gpu& gpu, const SurveyedGpus& found) {
  Object out = {{"memory_bytes", gpu.memory_bytes}};
  if (line.has("--gpu-memory")) return out;
  out["name"] = gpu.name;
  const GpuFacts facts = found.visible.gpus.front().facts;
  out["uuid"] = facts.uuid;
  if (facts.memory == 0) {
    log_note("GPU-34",
             found.survey.problem + ": planning with the memory that a " + gpu.name + " is sold with");
  }
  if (found.visible.order_guessed) {
    log_note("DEV-34", "CUDA_DEVICE_ORDER=" + found.cuda.device_order +
                           ": only CUDA knows which GPU it puts first; this plan is for " + gpu.name);
  }
  return out;
}

// What a plan is made from: as much as the door can know.
struct Question {
  Config config;
  PlannedModel model;
  Machine machine;
  Object gpu;  // null on the CPU
  DeviceType device = DeviceType::kCpu;
  std::optional<NumericsPlan> recorded;
  std::string cache_dir;
  bool imagined = false;  // another machine than this one

  PlanInputs inputs() const {
    PlanInputs out = model.inputs(config, device);
    out.recorded = recorded ? &*recorded : nullptr;
    return out;
  }
};

std::unique_ptr<Question> question_of(const CommandLine& line) {
  const std::string& config_path = line.positional[0];
  auto out = std::make_unique<Question>();
  out->config = load_config(config_path, line.overrides);
  const Config& config = out->config;
  const Environment environment = read_environment();
  out->cache_dir = environment.cache_dir;
  out->model = open_model(config, environment);
  const SurveyedGpus found = survey_visible_gpus();
  out->machine =
      survey_machine(found.visible.facts(), {line.bytes("--gpu-memory"), line.bytes("--host-memory")});
  // An imagined machine may have the disks of this one, or none that is here.
  out->imagined = line.has("--gpu-memory") || line.has("--host-memory");
  if (!out->imagined) check_disks(config);
  out->machine.disks = survey_disks(config, environment.cache_dir, DiskRates::kKnown);
  const bool gpu = plan_for_gpu(line, config.run.device, found);
  if (gpu) require_gpu_memory(out->machine.gpus.front(), found);
  if (gpu) out->gpu = gpu_object(line, out->machine.gpus.front(), found);
  out->device = gpu ? DeviceType::kCuda : DeviceType::kCpu;
  if (out->imagined) return out;
  // What a start would find: the run's numerics, and rates that an earlier run has measured.
  out->recorded = recorded_numerics(run_directory(config, config_path), config, out->device);
  const DType dtype = config.model.dtype == ModelDType::kBF16 ? DType::kBF16 : DType::kF32;
  const auto threads =
      out->recorded ? out->recorded->threads : config.run.threads.value_or(out->machine.cores);
  const RateSubject subject{out->device, dtype, static_cast<int>(threads)};
  if (const auto rates = known_rates(out->machine, subject, out->cache_dir))
    set_rates(subject, *rates, out->machine);
  return out;
}

struct Planned {
  Plan plan;
  Object gpu;                    // null on the CPU
  std::optional<Error> refusal;  // why it does not fit, and what would
};

Planned plan_of(const CommandLine& line) {
  const std::unique_ptr<Question> question = question_of(line);
  Machine& machine = question->machine;
  const PlanInputs inputs = question->inputs();
  try {
    Plan plan = make_plan(inputs, machine);
    if (!question->imagined && plan.placement.on_disk()) {
      machine.disks = survey_disks(question->config, question->cache_dir, DiskRates::kMeasured);
      plan = make_plan(inputs, machine);
    }
    return {std::move(plan), question->gpu, std::nullopt};
  } catch (const Error& error) {
    if (error.code() != Exit::kDoesNotFit) throw;
    return {draft_plan(inputs, machine), question->gpu, error};
  }
}

void print_gpu(const Object& gpu) {
  if (!gpu.contains("name")) return;
  const std::string uuid = gpu["uuid"].get<std::string>();
  std::printf("gpu: %s%s\n", escape_controls(gpu["name"].get<std::string>()).c_str(),
              uuid.empty() ? "" : escape_controls(" (" + uuid + ")").c_str());
}

void print_object(const Object& object) {
  std::puts(object.dump(2, ' ', false, Object::error_handler_t::replace).c_str());
}

Object refusal_object(const Error& refusal) {
  return {{"fits", false}, {"why", refusal.what()}, {"next", refusal.text().next}};
}

}  // namespace

Exit plan_command(const CommandLine& line) {
  try {
    const Planned planned = plan_of(line);
    if (!line.has("--json")) {
      if (planned.refusal) throw *planned.refusal;
      print_gpu(planned.gpu);
      std::fputs(print_plan(planned.plan).c_str(), stdout);
      return Exit::kDone;
    }
    // The same object whether it fits or not, so that a program can compare machines; a refusal adds its
    // reason.
    Object object = planned.refusal ? refusal_object(*planned.refusal) : Object::object();
    object.update(Object::parse(plan_json(planned.plan)));
    if (!planned.gpu.is_null()) object["gpu"] = planned.gpu;
    print_object(object);
    return planned.refusal ? planned.refusal->code() : Exit::kDone;
  } catch (const Error& error) {
    // Nothing to plan with, such as no GPU where one is asked for.
    if (error.code() != Exit::kDoesNotFit || !line.has("--json")) throw;
    print_object(refusal_object(error));
    return error.code();
  }
}

std::string less_host_memory(const CommandLine& line) {
  try {
    const std::unique_ptr<Question> question = question_of(line);
    return less_memory(question->inputs(), question->machine, Home::kHost);
  } catch (const Error&) {
    return "";  // asked after a run has failed, when the machine may have changed
  }
}

}  // namespace lm
