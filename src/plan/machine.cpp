#include "plan/machine.h"

#include <algorithm>
#include <cctype>

namespace lm {
namespace {

constexpr double kTera = 1e12;
constexpr double kGigabyte = 1e9;

constexpr int64_t gib(int64_t n) {
  return n << 30;
}
constexpr int64_t gb(int64_t n) {
  return n * 1'000'000'000;
}

// A GPU that the table does not know computes at least like this (a data centre card of 2020).
constexpr GpuPeaks kUnknownGpu{"unknown", 125 * kTera, 19.5 * kTera, 900 * kGigabyte, gib(24)};

// Per core when nothing was measured. bf16 with AVX-512-BF16: half of what two cores of a current server
// reach in large GEMMs; without it oneDNN converts to fp32.
constexpr double kCoreBF16 = 100e9, kCoreF32 = 50e9, kCoreBandwidth = 10e9, kSocketBandwidth = 200e9;

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return out;
}

double known(double value, double otherwise) {
  return value > 0 ? value : otherwise;
}

}  // namespace

const std::vector<GpuPeaks>& gpu_peaks_table() {
  // The first entry whose name occurs in the driver's wins, so variants stand before the plain name.
  static const std::vector<GpuPeaks> kTable = {
      {"B200", 2250 * kTera, 75 * kTera, 8000 * kGigabyte, gb(180)},
      {"GH200", 989.4 * kTera, 66.9 * kTera, 4000 * kGigabyte, gb(96)},
      {"H200", 989.4 * kTera, 66.9 * kTera, 4800 * kGigabyte, gb(141)},
      {"H100 PCIe", 756 * kTera, 51 * kTera, 2000 * kGigabyte, gb(80)},
      {"H100 NVL", 835 * kTera, 60 * kTera, 3900 * kGigabyte, gb(94)},
      {"H100", 989.4 * kTera, 66.9 * kTera, 3350 * kGigabyte, gb(80)},
      {"A100-SXM4-40GB", 312 * kTera, 19.5 * kTera, 1555 * kGigabyte, gb(40)},
      {"A100-PCIE-40GB", 312 * kTera, 19.5 * kTera, 1555 * kGigabyte, gb(40)},
      {"A100", 312 * kTera, 19.5 * kTera, 2039 * kGigabyte, gb(80)},
      {"RTX 6000 Ada", 364 * kTera, 91.1 * kTera, 960 * kGigabyte, gib(48)},
      {"L40S", 362 * kTera, 91.6 * kTera, 864 * kGigabyte, gib(48)},
      {"4090", 165.2 * kTera, 82.6 * kTera, 1008 * kGigabyte, gib(24)},
      {"3090", 71 * kTera, 35.6 * kTera, 936 * kGigabyte, gib(24)},
  };
  return kTable;
}

std::optional<GpuPeaks> find_gpu_peaks(std::string_view name) {
  const std::string wanted = lower(name);
  if (wanted.find("laptop") != std::string::npos) return std::nullopt;  // other chips under the same number
  for (const GpuPeaks& entry : gpu_peaks_table()) {
    if (wanted.find(lower(entry.name)) != std::string::npos) return entry;
  }
  return std::nullopt;
}

int64_t Machine::host_capacity_bytes() const {
  return host_limit_bytes > 0 ? std::min(host_total_bytes, host_limit_bytes) : host_total_bytes;
}

Rates effective_rates(const Machine& machine, bool gpu) {
  Rates rates;
  if (gpu) {
    const Gpu device = machine.gpus.empty() ? Gpu{} : machine.gpus.front();
    const auto entry = find_gpu_peaks(device.name);
    const GpuPeaks peaks = entry.value_or(kUnknownGpu);
    rates.bf16_flops = known(device.bf16_flops, peaks.bf16_flops);
    rates.fp32_flops = known(device.fp32_flops, peaks.fp32_flops);
    rates.bandwidth = known(device.bandwidth, peaks.bandwidth);
    rates.measured = entry.has_value() || (device.bf16_flops > 0 && device.bandwidth > 0);
    return rates;
  }
  const double cores = std::max(machine.cores, 1);
  rates.fp32_flops = known(machine.gemm_fp32_flops, cores * kCoreF32);
  rates.bf16_flops =
      known(machine.gemm_bf16_flops, machine.has_avx512_bf16 ? cores * kCoreBF16 : rates.fp32_flops);
  rates.bandwidth = known(machine.memory_bandwidth, std::min(cores * kCoreBandwidth, kSocketBandwidth));
  rates.measured = machine.gemm_bf16_flops > 0 && machine.gemm_fp32_flops > 0 && machine.memory_bandwidth > 0;
  return rates;
}

}  // namespace lm
