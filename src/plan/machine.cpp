#include "plan/machine.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "base/bytes.h"

namespace lm {
namespace {

// Of a current NVMe drive and a PCIe 4 x16 slot, where nothing was measured.
constexpr double kDiskRead = 3e9, kDiskWrite = 2e9, kLink = 22e9;

// Where nothing was measured.
constexpr int64_t kCpuBase = 140 * kMiB, kCudaBase = 900 * kMiB;
// What the libraries take more once products and threads have run: 12 to 16 MiB in runs of models of 2 to 6
// layers of 256 and 512.
constexpr int64_t kCpuGrowth = 14 * kMiB;

// Of NVLink's rate, that large collectives reach.
constexpr double kReachedOfNvlink = 0.8;

struct KnownGpu {
  const char* name;
  double bf16_tflops, fp32_tflops, gb_per_second;
  int64_t gigabytes;  // of 10^9, as data centre cards are sold; consumer cards have a little more
  int processors;
  double peer_gb_per_second = 0;  // NVLink, each way; 0: over PCIe
};

// Dense peaks (never the sparse ones) with fp32 accumulation, as published; more specific names first.
constexpr std::array<KnownGpu, 20> kKnown = {{
    {"GB200", 2500, 80, 8000, 186, 152, 900},
    {"B200", 2250, 75, 8000, 180, 148, 900},
    {"GH200", 989.4, 66.9, 4000, 96, 132, 450},
    {"H200", 989.4, 66.9, 4800, 141, 132, 450},
    {"H100 PCIe", 756, 51, 2000, 80, 114},
    {"H100 NVL", 835, 60, 3900, 94, 132, 300},
    {"H100", 989.4, 66.9, 3350, 80, 132, 450},
    {"A100-SXM4-40GB", 312, 19.5, 1555, 40, 108, 300},
    {"A100-PCIE-40GB", 312, 19.5, 1555, 40, 108},
    {"A100", 312, 19.5, 2039, 80, 108, 300},
    {"L40S", 362, 91.6, 864, 48, 142},
    {"L40", 181, 90.5, 864, 48, 142},
    {"RTX 6000 Ada", 364, 91.1, 960, 48, 142},
    {"RTX 5090", 209.5, 104.8, 1792, 32, 170},
    {"4090", 165.2, 82.6, 1008, 24, 128},
    {"3090", 71, 35.6, 936, 24, 82},
    {"A6000", 155, 38.7, 768, 48, 84},
    {"A10G", 70, 35, 600, 24, 80},
    {"A10", 125, 31.2, 600, 24, 72},
    {"L4", 121, 30.3, 300, 24, 58},
}};

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

}  // namespace

Gpu known_gpu(const std::string& name) {
  Gpu gpu;
  gpu.name = name;
  const std::string wanted = lower(name);
  if (wanted.find("laptop") != std::string::npos) return gpu;  // other chips under the same number
  for (const KnownGpu& known : kKnown) {
    if (wanted.find(lower(known.name)) == std::string::npos) continue;
    gpu.memory_bytes = known.gigabytes * 1'000'000'000;
    gpu.processors = known.processors;
    if (wanted.find("pcie") == std::string::npos)
      gpu.peer_bandwidth = kReachedOfNvlink * known.peer_gb_per_second * 1e9;
    gpu.bf16_flops = known.bf16_tflops * 1e12;
    gpu.fp32_flops = known.fp32_tflops * 1e12;
    gpu.bandwidth = known.gb_per_second * 1e9;
    return gpu;
  }
  return gpu;
}

int64_t Machine::host_capacity() const {
  if (host_limit <= 0) return host_memory;
  return host_memory > 0 ? std::min(host_memory, host_limit) : host_limit;
}

int64_t host_library_bytes(const Machine& machine, DeviceType device) {
  if (device == DeviceType::kCuda) return kCudaBase;
  return machine.library_bytes > 0 ? machine.library_bytes + kCpuGrowth : kCpuBase;
}

std::string kernel_set(const Machine& machine, DeviceType device) {
  if (device == DeviceType::kCuda) return "cuda " + machine.gpus.front().name;
  if (machine.instructions == Instructions::kNone) return "cpu";
  // VBMI changes which code looks up 8-bit codes, and no bit of a result.
  const bool core = machine.instructions == Instructions::kAvx512Vbmi;
  return std::string("cpu ") + instructions_name(core ? Instructions::kAvx512Core : machine.instructions);
}

LinkRates link_rates(const Machine& machine, DeviceType device) {
  LinkRates rates;
  double both = 0;
  bool measured = true;
  for (const Disk& disk : machine.disks) {
    rates.disk_read += disk.read_bandwidth;
    rates.disk_write += disk.write_bandwidth;
    both += disk.both_bandwidth;
    measured &= disk.both_bandwidth > 0;
  }
  rates.assumed = rates.disk_read <= 0 || rates.disk_write <= 0;
  // Of a disk that takes turns both ways together take as long as one after the other: a half.
  if (measured && !rates.assumed)
    rates.disk_share = std::min(1.0, both / 4 * (1 / rates.disk_read + 1 / rates.disk_write));
  if (rates.assumed) rates.disk_read = kDiskRead, rates.disk_write = kDiskWrite;
  rates.link = device == DeviceType::kCuda && machine.gpus.front().link_bandwidth > 0
                   ? machine.gpus.front().link_bandwidth
                   : kLink;
  return rates;
}

}  // namespace lm
