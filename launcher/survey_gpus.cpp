// GPUs by NVML, loaded from the driver's library at run time, so that the door links nothing of CUDA. The few
// declarations below are NVML's stable C interface (version 2 entry points).
#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "launcher/survey.h"

namespace lm {
namespace {

struct NvmlMemory {
  unsigned long long total, free, used;
};
using NvmlDevice = void*;

class Nvml {
 public:
  Nvml() : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
    const auto init = find<int (*)()>("nvmlInit_v2");
    ready_ = init != nullptr && init() == 0;
  }
  ~Nvml() {
    if (ready_) find<int (*)()>("nvmlShutdown")();
    // The library stays loaded: unloading it is not safe with every driver, and the process is short.
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  bool ready() const { return ready_; }

  std::vector<GpuFacts> devices() const {
    const auto count_of = find<int (*)(unsigned*)>("nvmlDeviceGetCount_v2");
    const auto handle_of = find<int (*)(unsigned, NvmlDevice*)>("nvmlDeviceGetHandleByIndex_v2");
    const auto name_of = find<int (*)(NvmlDevice, char*, unsigned)>("nvmlDeviceGetName");
    const auto memory_of = find<int (*)(NvmlDevice, NvmlMemory*)>("nvmlDeviceGetMemoryInfo");
    std::vector<GpuFacts> out;
    unsigned count = 0;
    if (!count_of || !handle_of || !name_of || !memory_of || count_of(&count) != 0) return out;
    for (unsigned i = 0; i < count; ++i) {
      NvmlDevice device = nullptr;
      if (handle_of(i, &device) != 0) continue;
      char name[128] = "";
      NvmlMemory memory{};
      GpuFacts gpu;
      if (name_of(device, name, sizeof name) == 0) gpu.name = name;
      if (memory_of(device, &memory) == 0) {
        gpu.memory = static_cast<int64_t>(memory.total);
        gpu.free_memory = static_cast<int64_t>(memory.free);
      }
      out.push_back(gpu);
    }
    return out;
  }

 private:
  template <class F>
  F find(const char* name) const {
    return library_ == nullptr ? nullptr : reinterpret_cast<F>(dlsym(library_, name));
  }
  void* library_;
  bool ready_ = false;
};

// Names from the kernel driver alone.
std::vector<GpuFacts> names_from_proc() {
  std::vector<GpuFacts> out;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/driver/nvidia/gpus", error)) {
    std::ifstream file(entry.path() / "information");
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with("Model:")) continue;
      GpuFacts gpu;
      gpu.name = line.substr(std::min(line.find_first_not_of(" \t", 6), line.size()));
      out.push_back(gpu);
    }
  }
  return out;
}

}  // namespace

std::vector<GpuFacts> survey_gpus() {
  if (count_gpus() == 0) return {};
  const Nvml nvml;
  return nvml.ready() ? nvml.devices() : names_from_proc();
}

}  // namespace lm
