// GPUs through NVML, loaded from the driver's library at run time, so that the CLI does not link CUDA. The
// few declarations below are NVML's stable C interface (version 2 entry points).
#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>

#include "launcher/machine/survey.h"

namespace lm {
namespace {

struct NvmlMemory {
  unsigned long long total, free, used;
};
using NvmlDevice = void*;

struct NvmlPci {
  char legacy_bus_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
};

class Nvml {
 public:
  Nvml() : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
    const auto init = find<int (*)()>("nvmlInit_v2");
    status_ = init == nullptr ? -1 : init();
  }
  ~Nvml() {
    if (status_ == 0) find<int (*)()>("nvmlShutdown")();
    // The library stays loaded: unloading it is not safe with every driver, and the process is short-lived.
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  GpuSurvey survey() const {
    if (library_ == nullptr) return {{}, "NVML (libnvidia-ml.so.1) cannot be loaded"};
    if (status_ != 0) return {{}, "NVML (libnvidia-ml.so.1) does not start: " + status_text()};
    std::vector<Found> found = devices();
    // NVML guarantees no order.
    std::stable_sort(found.begin(), found.end(),
                     [](const Found& a, const Found& b) { return a.pci < b.pci; });
    GpuSurvey out;
    for (Found& one : found) {
      if (one.facts.memory == 0) out.problem = "NVML does not report the memory of " + one.facts.name;
      out.cards.push_back(std::move(one.facts));
    }
    if (out.cards.empty()) out.problem = "NVML (libnvidia-ml.so.1) lists no GPU";
    return out;
  }

 private:
  struct Found {
    std::array<unsigned, 3> pci{};  // domain, bus, device
    GpuFacts facts;
  };

  // For example "Driver/library version mismatch", after a driver update under a running system.
  std::string status_text() const {
    const auto text_of = find<const char* (*)(int)>("nvmlErrorString");
    return text_of ? text_of(status_) : fmt::format("error {}", status_);
  }

  std::vector<Found> devices() const {
    const auto count_of = find<int (*)(unsigned*)>("nvmlDeviceGetCount_v2");
    const auto handle_of = find<int (*)(unsigned, NvmlDevice*)>("nvmlDeviceGetHandleByIndex_v2");
    const auto name_of = find<int (*)(NvmlDevice, char*, unsigned)>("nvmlDeviceGetName");
    const auto uuid_of = find<int (*)(NvmlDevice, char*, unsigned)>("nvmlDeviceGetUUID");
    const auto memory_of = find<int (*)(NvmlDevice, NvmlMemory*)>("nvmlDeviceGetMemoryInfo");
    const auto pci_of = find<int (*)(NvmlDevice, NvmlPci*)>("nvmlDeviceGetPciInfo_v3");
    std::vector<Found> out;
    unsigned count = 0;
    if (!count_of || !handle_of || count_of(&count) != 0) return out;
    for (unsigned i = 0; i < count; ++i) {
      NvmlDevice device = nullptr;
      if (handle_of(i, &device) != 0) continue;
      char name[128] = "", uuid[96] = "";
      NvmlMemory memory{};
      NvmlPci pci{};
      Found one;
      if (name_of && name_of(device, name, sizeof name) == 0) one.facts.name = name;
      if (uuid_of && uuid_of(device, uuid, sizeof uuid) == 0) one.facts.uuid = uuid;
      if (memory_of && memory_of(device, &memory) == 0) {
        one.facts.memory = static_cast<int64_t>(memory.total);
        one.facts.free_memory = static_cast<int64_t>(memory.free);
      }
      if (pci_of && pci_of(device, &pci) == 0) {
        one.pci = {pci.domain, pci.bus, pci.device};
        char address[32] = "";  // as /sys writes it
        std::snprintf(address, sizeof address, "%04x:%02x:%02x.0", pci.domain, pci.bus, pci.device);
        one.facts.pci_address = address;
      }
      one.facts.figures = figures_of(device);
      out.push_back(std::move(one));
    }
    return out;
  }

  // Figures that a driver does not report stay 0.
  GpuFigures figures_of(NvmlDevice device) const {
    constexpr int kClockSm = 1, kClockMemory = 2;
    const auto capability_of = find<int (*)(NvmlDevice, int*, int*)>("nvmlDeviceGetCudaComputeCapability");
    const auto clock_of = find<int (*)(NvmlDevice, int, unsigned*)>("nvmlDeviceGetMaxClockInfo");
    const auto cores_of = find<int (*)(NvmlDevice, unsigned*)>("nvmlDeviceGetNumGpuCores");
    const auto bus_of = find<int (*)(NvmlDevice, unsigned*)>("nvmlDeviceGetMemoryBusWidth");
    const auto number = [](const auto& ask) {
      unsigned value = 0;
      return ask(&value) == 0 ? static_cast<int>(value) : 0;
    };
    GpuFigures out;
    int major = 0, minor = 0;
    if (capability_of && capability_of(device, &major, &minor) == 0) out.capability = {major, minor};
    if (cores_of) out.cores = number([&](unsigned* to) { return cores_of(device, to); });
    if (bus_of) out.bus_bits = number([&](unsigned* to) { return bus_of(device, to); });
    if (clock_of) out.clock_mhz = number([&](unsigned* to) { return clock_of(device, kClockSm, to); });
    if (clock_of)
      out.memory_clock_mhz = number([&](unsigned* to) { return clock_of(device, kClockMemory, to); });
    return out;
  }

  template <class F>
  F find(const char* name) const {
    return library_ == nullptr ? nullptr : reinterpret_cast<F>(dlsym(library_, name));
  }
  void* library_;
  int status_;  // nvmlInit's
};

// What the kernel driver alone reports: names and, once a program has used the card, UUIDs. A directory's
// name is the card's PCI address.
std::vector<GpuFacts> cards_from_proc(const std::string& root) {
  std::map<std::string, GpuFacts> by_address;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(root + "/proc/driver/nvidia/gpus", error)) {
    const auto value = [](const std::string& line) {
      return line.substr(std::min(line.find_first_not_of(" \t", line.find(':') + 1), line.size()));
    };
    GpuFacts& gpu = by_address[entry.path().filename().string()];
    gpu.pci_address = entry.path().filename().string();
    std::ifstream file(entry.path() / "information");
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with("Model:")) gpu.name = value(line);
      // Question marks until the card has been used.
      if (line.starts_with("GPU UUID:") && line.find('?') == std::string::npos) gpu.uuid = value(line);
    }
  }
  std::vector<GpuFacts> out;
  for (auto& [address, gpu] : by_address) out.push_back(std::move(gpu));
  return out;
}

}  // namespace

GpuSurvey survey_gpus(const std::string& root) {
  const int count = count_gpus(root);
  if (count == 0) return {};
  GpuSurvey out = root.empty() ? Nvml().survey() : GpuSurvey{{}, "NVML is not asked about " + root};
  if (!out.cards.empty()) return out;
  out.cards = cards_from_proc(root);
  // A container's /proc may list cards that its /dev does not have: then cards cannot be told apart.
  if (out.cards.size() != static_cast<size_t>(count)) out.cards.assign(static_cast<size_t>(count), {});
  return out;
}

}  // namespace lm
