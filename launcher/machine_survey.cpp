#include "launcher/machine_survey.h"

#include <algorithm>

#include "launcher/survey.h"

namespace lm {

Machine survey_machine(const ImaginedMemory& imagined) {
  const HostFacts host = survey_host();
  Machine machine;
  machine.cores = host.cpu.cores;
  machine.cpu_model = host.cpu.model;
  machine.avx512_bf16 = host.cpu.avx512_bf16;
  machine.host_memory = host.memory;
  machine.host_available = host.available_memory;
  machine.host_limit = host.limit.bytes;
  if (host.limit.bytes > 0) machine.host_available = std::min(machine.host_available, host.limit.bytes);
  for (const GpuFacts& found : survey_gpus()) {
    Gpu gpu = known_gpu(found.name);
    gpu.name = found.name;
    if (found.memory > 0) gpu.memory_bytes = found.memory;
    gpu.free_bytes = found.free_memory;
    machine.gpus.push_back(gpu);
  }
  if (imagined.host_bytes) {
    machine.host_memory = machine.host_available = *imagined.host_bytes;
    machine.host_limit = 0;
  }
  if (imagined.gpu_bytes) {
    machine.gpus.resize(1);  // a GPU that is there lends its name and its rates
    machine.gpus[0].memory_bytes = *imagined.gpu_bytes;
    machine.gpus[0].free_bytes = 0;
  }
  return machine;
}

}  // namespace lm
