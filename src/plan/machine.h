// What the plan knows of a machine, as a value: measured by the survey, or imagined on the command line. Rates
// are per second; 0 means "not measured", and the plan then takes the documented default.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lm {

struct Gpu {
  std::string name;
  int64_t memory_bytes = 0;
  double bf16_flops = 0;        // dense peak
  double fp32_flops = 0;
  double bandwidth = 0;         // bytes/s
};

struct Machine {
  int cores = 1;                // that this process may use
  std::string cpu_model;
  bool avx512_bf16 = false;
  int64_t host_memory = 0;      // physical
  int64_t host_available = 0;   // MemAvailable, or less under a cgroup limit or RLIMIT_AS
  double gemm_bf16_flops = 0;   // of all cores together
  double gemm_fp32_flops = 0;
  double memory_bandwidth = 0;
  std::vector<Gpu> gpus;
};

// Dense peaks and sizes of known GPUs by (part of) their name; all zero when unknown.
Gpu known_gpu(const std::string& name);

}  // namespace lm
