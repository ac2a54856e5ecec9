// NVML's stable C interface, loaded from the driver's library at run time, as in survey_gpus.cpp.
#include "launcher/machine/gpu_meter.h"

#include <dlfcn.h>

#include <algorithm>

#include "launcher/environment.h"
#include "launcher/machine/survey.h"
#include "launcher/machine/visible_gpus.h"

namespace lm {
namespace {

struct NvmlRates {
  unsigned gpu, memory;  // percent
};

}  // namespace

template <class F>
F GpuMeter::find(const char* name) const {
  return library_ == nullptr ? nullptr : reinterpret_cast<F>(dlsym(library_, name));
}

GpuMeter::GpuMeter() {
  const CudaVariables cuda = read_cuda_variables();
  const VisibleGpus visible = visible_gpus(survey_gpus().cards, cuda.visible_devices, cuda.device_order);
  if (visible.gpus.empty()) return;
  library_ = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  const auto init = find<int (*)()>("nvmlInit_v2");
  started_ = init != nullptr && init() == 0;
  const auto count_of = find<int (*)(unsigned*)>("nvmlDeviceGetCount_v2");
  const auto handle_of = find<int (*)(unsigned, void**)>("nvmlDeviceGetHandleByIndex_v2");
  const auto uuid_of = find<int (*)(void*, char*, unsigned)>("nvmlDeviceGetUUID");
  unsigned count = 0;
  if (!started_ || !count_of || !handle_of || !uuid_of || count_of(&count) != 0) return;
  for (unsigned i = 0; i < count; ++i) {
    void* device = nullptr;
    char uuid[96] = "";
    if (handle_of(i, &device) != 0 || uuid_of(device, uuid, sizeof uuid) != 0) continue;
    const auto shown =
        std::ranges::find_if(visible.gpus, [&](const GpuFacts& gpu) { return gpu.uuid == uuid; });
    if (shown != visible.gpus.end()) gpus_.push_back({device, uuid, shown->name});
  }
}

GpuMeter::~GpuMeter() {
  const auto shutdown = find<int (*)()>("nvmlShutdown");
  if (started_ && shutdown != nullptr) shutdown();
  // The library stays loaded: unloading it is not safe with every driver.
}

std::vector<GpuReading> GpuMeter::read() const {
  constexpr int kDie = 0;    // NVML_TEMPERATURE_GPU
  constexpr int kClock = 1;  // NVML_CLOCK_SM
  const auto rates_of = find<int (*)(void*, NvmlRates*)>("nvmlDeviceGetUtilizationRates");
  const auto power_of = find<int (*)(void*, unsigned*)>("nvmlDeviceGetPowerUsage");
  const auto temperature_of = find<int (*)(void*, int, unsigned*)>("nvmlDeviceGetTemperature");
  const auto clock_of = find<int (*)(void*, int, unsigned*)>("nvmlDeviceGetClockInfo");
  std::vector<GpuReading> out;
  for (const Gpu& gpu : gpus_) {
    GpuReading one{
        .uuid = gpu.uuid, .name = gpu.name, .utilization = {}, .watts = {}, .celsius = {}, .megahertz = {}};
    NvmlRates rates{};
    unsigned milliwatts = 0, degrees = 0, megahertz = 0;
    if (rates_of && rates_of(gpu.device, &rates) == 0) one.utilization = rates.gpu / 100.0;
    if (power_of && power_of(gpu.device, &milliwatts) == 0) one.watts = milliwatts / 1000.0;
    if (temperature_of && temperature_of(gpu.device, kDie, &degrees) == 0) one.celsius = degrees;
    if (clock_of && clock_of(gpu.device, kClock, &megahertz) == 0) one.megahertz = megahertz;
    out.push_back(std::move(one));
  }
  return out;
}

}  // namespace lm
