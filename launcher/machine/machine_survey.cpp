#include "launcher/machine/machine_survey.h"

#include <algorithm>

#include "base/error.h"

namespace lm {

SurveyedGpus survey_visible_gpus() {
  SurveyedGpus out{read_cuda_variables(), survey_gpus(), {}};
  out.visible = visible_gpus(out.survey.cards, out.cuda.visible_devices, out.cuda.device_order);
  return out;
}

Machine survey_machine(const std::vector<GpuFacts>& gpus) {
  const HostFacts host = survey_host();
  Machine machine;
  machine.cores = host.cpu.cores;
  machine.cpu_model = host.cpu.model;
  machine.instructions = best_instructions();
  machine.host_memory = host.memory;
  machine.host_available = host.available_memory;
  machine.host_limit = host.limit.bytes;
  if (host.limit.bytes > 0) machine.host_available = std::min(machine.host_available, host.limit.bytes);
  for (const GpuFacts& found : gpus) {
    Gpu gpu = gpu_of(found.name, found.figures);
    if (found.memory > 0) gpu.memory_bytes = found.memory;
    gpu.free_bytes = found.free_memory;
    machine.gpus.push_back(gpu);
  }
  return machine;
}

Machine with_imagined(Machine machine, const Imagined& imagined) {
  if (imagined.host_bytes) {
    machine.host_memory = machine.host_available = *imagined.host_bytes;
    machine.host_limit = 0;
  }
  if (imagined.gpu) {
    machine.gpus.resize(1);
    Gpu& gpu = machine.gpus[0];
    // Only a size was given: name and rates are those of the GPU that is here.
    const int64_t size = imagined.gpu->memory_bytes;
    if (!imagined.gpu->name.empty() || imagined.gpu->bf16_flops > 0) gpu = *imagined.gpu;
    gpu.memory_bytes = size;
    gpu.free_bytes = 0;
    // Another card than this one, which may have bf16.
    if (imagined.gpu->name.empty() && gpu.capability.major < 8) gpu.capability = {};
  }
  return machine;
}

ComputingGpu computing_gpu(const GpuSurvey& survey, const GpuInfo& device) {
  ComputingGpu out{{.name = device.name, .uuid = device.uuid}, ""};
  const auto card = std::find_if(survey.cards.begin(), survey.cards.end(), [&](const GpuFacts& facts) {
    return !facts.uuid.empty() && facts.uuid == device.uuid;
  });
  if (card != survey.cards.end()) out.facts = *card;
  out.facts.figures.capability = {device.major, device.minor};
  if (out.facts.name.empty()) out.facts.name = device.name;
  if (out.facts.memory > 0) return out;
  out.facts.memory = device.total_bytes;
  out.facts.free_memory = device.free_bytes;
  const std::string reason = !survey.problem.empty()      ? survey.problem
                             : card == survey.cards.end() ? "NVML lists no GPU of this UUID"
                                                          : "NVML does not report its memory";
  out.note = reason + ": planning with CUDA's own figures";
  return out;
}

void require_gpu_code(const Gpu& gpu) {
  const GpuObstacle obstacle = gpu_obstacle(gpu.capability, gpu_code());
  if (obstacle.what.empty()) return;
  throw Error(
      Exit::kDoesNotFit,
      {.area = "GPU-34", .what = gpu.name + " has " + obstacle.what, .place = "", .next = obstacle.next});
}

}  // namespace lm
