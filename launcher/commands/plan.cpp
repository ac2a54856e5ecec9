#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/json.h"
#include "config/config_toml.h"
#include "launcher/commands/commands.h"
#include "launcher/device_choice.h"
#include "launcher/environment.h"
#include "launcher/machine_survey.h"
#include "plan/plan.h"
#include "spec/block_layout.h"
#include "spec/model_spec.h"

namespace lm {
namespace {

// The adapter that is trained: a given one brings its own rank, scale and targets.
AdapterSpec adapter_spec(const LoraConfig& lora, const std::string& config_path) {
  AdapterSpec out;
  out.r = lora.r;
  out.alpha = lora.alpha;
  out.rslora = lora.rslora;
  out.dropout = lora.dropout;
  std::vector<std::string> targets = lora.targets;
  std::string place = config_path;
  if (!lora.init.empty()) {
    place = lora.init + "/adapter_config.json";
    const Json json = read_json_file(place, {.bytes = 1 << 20, .depth = 16});
    out.r = json.value("r", out.r);
    out.alpha = json.value("lora_alpha", out.alpha);
    out.rslora = json.value("use_rslora", false);
    const Json modules = json.value("target_modules", Json());
    if (modules.is_array()) targets = modules.get<std::vector<std::string>>();
    if (modules.is_string()) targets = {modules.get<std::string>()};
  }
  out.targets = resolve_targets(targets, place);
  return out;
}

// A GPU that --gpu-memory imagines is as good as one that is there.
bool plan_for_gpu(const CommandLine& line, DeviceChoice configured, const Machine& machine) {
  const DeviceFacts facts{.gpus = static_cast<int>(machine.gpus.size()), .cuda_program = true};
  return decide_device(line, configured, facts).cuda;
}

Plan plan_of(const CommandLine& line) {
  const std::string& config_path = line.positional[0];
  const Config config = load_config(config_path, line.overrides);
  const ModelSpec spec = read_model_spec(resolve_model(config.model.path, read_environment()));
  AdapterSpec adapter;
  const bool lora = config.train.method == Method::kLora;
  if (lora) adapter = adapter_spec(config.lora, config_path);
  const AdapterSpec* trained = lora ? &adapter : nullptr;
  const DType dtype = config.model.dtype == ModelDType::kBF16 ? DType::kBF16 : DType::kF32;
  const ModelLayout layout = make_layout(spec, trained, dtype);
  const Machine machine = survey_machine({line.bytes("--gpu-memory"), line.bytes("--host-memory")});
  const bool gpu = plan_for_gpu(line, config.run.device, machine);
  return make_plan(config, spec, trained, layout, machine, gpu ? DeviceType::kCuda : DeviceType::kCpu);
}

}  // namespace

Exit plan_command(const CommandLine& line) {
  try {
    const Plan plan = plan_of(line);
    const std::string text = line.has("--json") ? plan_json(plan) : print_plan(plan);
    std::fputs(text.c_str(), stdout);
    if (!text.ends_with('\n')) std::fputc('\n', stdout);
    return Exit::kDone;
  } catch (const Error& error) {
    if (error.code() != Exit::kDoesNotFit || !line.has("--json")) throw;
    const nlohmann::ordered_json json = {{"fits", false}, {"why", error.what()}, {"next", error.text().next}};
    std::printf("%s\n", json.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
    return error.code();
  }
}

}  // namespace lm
