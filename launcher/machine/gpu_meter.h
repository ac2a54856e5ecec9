// Live readings of GPUs through NVML: utilization, power, temperature and the clock of the multiprocessors. A
// reading may take milliseconds, and as long as the driver likes: not for the compute thread. One thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace lm {

struct GpuReading {
  std::string uuid, name;
  std::optional<double> utilization, watts, celsius;  // nullopt: the driver does not report it
  std::optional<double> megahertz = {};               // likewise
};

class GpuMeter {
 public:
  // Opens the GPUs that CUDA shows to this process; none without a driver.
  GpuMeter();
  ~GpuMeter();
  GpuMeter(const GpuMeter&) = delete;
  GpuMeter& operator=(const GpuMeter&) = delete;

  std::vector<GpuReading> read() const;

 private:
  struct Gpu {
    void* device;  // NVML's handle
    std::string uuid, name;
  };
  template <class F>
  F find(const char* name) const;
  void* library_ = nullptr;
  bool started_ = false;
  std::vector<Gpu> gpus_;
};

}  // namespace lm
