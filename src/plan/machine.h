// What the plan knows of a machine, as a plain value: the survey fills it from the real one, `lmlaunch plan
// --gpu-memory ...` from an imagined one, tests by hand. Capacities (totals, limits) may steer numerics; what
// happens to be free now and the rates never do. Units: bytes, FLOP per second, bytes per second; 0 =
// unknown.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lm {

// Dense peaks of one GPU model by its data sheet, without structured sparsity.
struct GpuPeaks {
  std::string_view name;  // how the driver's name contains it, e.g. "H100"
  double bf16_flops = 0;  // tensor cores, fp32 accumulation
  double fp32_flops = 0;
  double bandwidth = 0;      // of its memory
  int64_t memory_bytes = 0;  // nominal
};

// The entry for a name as the driver gives it ("NVIDIA H100 80GB HBM3") or a user types it ("H100"); nothing
// when the model is not in the table.
std::optional<GpuPeaks> find_gpu_peaks(std::string_view name);
const std::vector<GpuPeaks>& gpu_peaks_table();

struct Gpu {
  std::string name;
  int64_t memory_bytes = 0;  // total, as the driver reports it
  int64_t free_bytes = 0;    // now, before our process has a context; 0 = unknown
  double bf16_flops = 0;     // 0: from the table, else kUnknownGpu
  double fp32_flops = 0;
  double bandwidth = 0;
};

struct Machine {
  int cores = 1;  // that this process may use (affinity and cgroup quota)
  std::string cpu_model;
  bool has_avx512_bf16 = false;
  int64_t host_total_bytes = 0;
  int64_t host_available_bytes = 0;  // now; 0 = unknown
  int64_t host_limit_bytes = 0;      // the smallest of cgroup and RLIMIT limits; 0 = none
  double gemm_bf16_flops = 0;        // measured, all cores; 0: see effective_rates
  double gemm_fp32_flops = 0;
  double memory_bandwidth = 0;  // measured, all cores, read + write
  std::vector<Gpu> gpus;

  // The most host memory that this process can ever have.
  int64_t host_capacity_bytes() const;
};

// Rates of the device that computes, unknown ones replaced: a GPU's by the table, else by kUnknownGpu; a
// CPU's by what one core of a current server does times `cores`.
struct Rates {
  double bf16_flops = 0;  // GEMM; on GPUs the dense peak, on CPUs what was measured
  double fp32_flops = 0;
  double bandwidth = 0;
  bool measured = false;  // no number was replaced
};
Rates effective_rates(const Machine& machine, bool gpu);

}  // namespace lm
