#include "launcher/machine_survey.h"

#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/error.h"
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

std::vector<Disk> survey_disks(const std::vector<std::string>& paths) {
  std::vector<Disk> disks;
  for (const std::string& path : paths) {
    struct statvfs info {};
    if (statvfs(path.c_str(), &info) != 0) {
      throw Error(Exit::kDoesNotFit, {.area = "DISK-33",
                                      .what = std::string("offload.paths: ") + std::strerror(errno),
                                      .place = path,
                                      .next = "create the directory, or name another one",
                                      .kept = ""});
    }
    disks.push_back({path, static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize), 0, 0});
  }
  return disks;
}

}  // namespace lm
