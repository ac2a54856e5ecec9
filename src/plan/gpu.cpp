#include "plan/gpu.h"

#include <array>
#include <cctype>
#include <charconv>
#include <sstream>
#include <vector>

namespace lm {
namespace {

// Of NVLink's rate, that large collectives reach.
constexpr double kReachedOfNvlink = 0.8;

struct BuiltInGpu {
  const char* name;
  double bf16_tflops, fp32_tflops, gb_per_second;
  int64_t gigabytes;  // of 10^9, as data centre cards are sold; consumer cards have a little more
  int processors;
  ComputeCapability capability;
  double peer_gb_per_second = 0;  // NVLink, each way; 0: over PCIe
};

// Dense peaks (never the sparse ones) with fp32 accumulation, as published; more specific names first.
// GeForce cards multiply bf16 at half of the rate that the same chip has in a workstation card.
constexpr std::array kKnown = {
    BuiltInGpu{"GB300", 2500, 80, 8000, 279, 152, {10, 3}, 900},
    BuiltInGpu{"B300", 2250, 75, 8000, 270, 148, {10, 3}, 900},
    BuiltInGpu{"GB200", 2500, 80, 8000, 186, 152, {10, 0}, 900},
    BuiltInGpu{"B200", 2250, 75, 8000, 180, 148, {10, 0}, 900},
    BuiltInGpu{"GH200", 989.4, 66.9, 4000, 96, 132, {9, 0}, 450},
    BuiltInGpu{"H200", 989.4, 66.9, 4800, 141, 132, {9, 0}, 450},
    BuiltInGpu{"H100 PCIe", 756, 51, 2000, 80, 114, {9, 0}},
    BuiltInGpu{"H100 NVL", 835, 60, 3900, 94, 132, {9, 0}, 300},
    BuiltInGpu{"H100", 989.4, 66.9, 3350, 80, 132, {9, 0}, 450},
    BuiltInGpu{"H20", 148, 44, 4000, 96, 78, {9, 0}, 450},
    BuiltInGpu{"A100-SXM4-40GB", 312, 19.5, 1555, 40, 108, {8, 0}, 300},
    BuiltInGpu{"A100-PCIE-40GB", 312, 19.5, 1555, 40, 108, {8, 0}},
    BuiltInGpu{"A100", 312, 19.5, 2039, 80, 108, {8, 0}, 300},
    BuiltInGpu{"A30", 165, 10.3, 933, 24, 56, {8, 0}},
    BuiltInGpu{"L40S", 362, 91.6, 864, 48, 142, {8, 9}},
    BuiltInGpu{"L40", 181, 90.5, 864, 48, 142, {8, 9}},
    BuiltInGpu{"L20", 119.5, 59.8, 864, 48, 92, {8, 9}},
    BuiltInGpu{"RTX 6000 Ada", 364, 91.1, 960, 48, 142, {8, 9}},
    BuiltInGpu{"RTX PRO 6000", 503.8, 125, 1792, 96, 188, {12, 0}},
    BuiltInGpu{"RTX 5090", 209.5, 104.8, 1792, 32, 170, {12, 0}},
    BuiltInGpu{"RTX 5080", 112.6, 56.3, 960, 16, 84, {12, 0}},
    BuiltInGpu{"RTX 5070 Ti", 87.9, 43.9, 896, 16, 70, {12, 0}},
    BuiltInGpu{"RTX 5070", 61.7, 30.9, 672, 12, 48, {12, 0}},
    BuiltInGpu{"RTX 5060 Ti", 47.4, 23.7, 448, 16, 36, {12, 0}},
    BuiltInGpu{"4090", 165.2, 82.6, 1008, 24, 128, {8, 9}},
    BuiltInGpu{"4080 SUPER", 104.4, 52.2, 736, 16, 80, {8, 9}},
    BuiltInGpu{"4080", 97.5, 48.7, 717, 16, 76, {8, 9}},
    BuiltInGpu{"4070 Ti", 80.2, 40.1, 504, 12, 60, {8, 9}},
    BuiltInGpu{"4070", 58.3, 29.1, 504, 12, 46, {8, 9}},
    BuiltInGpu{"4060 Ti", 44.1, 22.1, 288, 16, 34, {8, 9}},
    BuiltInGpu{"4060", 30.2, 15.1, 272, 8, 24, {8, 9}},
    BuiltInGpu{"3090", 71, 35.6, 936, 24, 82, {8, 6}},
    BuiltInGpu{"3080", 59.5, 29.8, 760, 10, 68, {8, 6}},
    BuiltInGpu{"3070", 40.6, 20.3, 448, 8, 46, {8, 6}},
    BuiltInGpu{"3060", 25.5, 12.7, 360, 12, 28, {8, 6}},
    BuiltInGpu{"A6000", 155, 38.7, 768, 48, 84, {8, 6}},
    BuiltInGpu{"A40", 149.7, 37.4, 696, 48, 84, {8, 6}},
    BuiltInGpu{"A10G", 70, 35, 600, 24, 80, {8, 6}},
    BuiltInGpu{"A10", 125, 31.2, 600, 24, 72, {8, 6}},
    BuiltInGpu{"L4", 121, 30.3, 300, 24, 58, {8, 9}},
    // Of fp16: it has no bf16. "NVIDIA T4" (data sheet): 65 TFLOPS of mixed precision, 8.1 of single, 320
    // tensor cores in 40 multiprocessors, 16 GB of GDDR6 at 320 GB/s.
    BuiltInGpu{"T4", 65, 8.1, 320, 16, 40, {7, 5}},
};

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

// "rtx a4000" does not name an A40.
bool names(const std::string& wanted, const std::string& known) {
  const size_t at = wanted.find(known), end = at + known.size();
  return at != std::string::npos &&
         (end == wanted.size() || !std::isdigit(static_cast<unsigned char>(wanted[end])));
}

// What a multiprocessor does in a clock. (From the architectures' white papers.)
struct PerClock {
  int cores;
  double bf16_flops, fp32_flops;
};

PerClock per_clock(const ComputeCapability& c, bool consumer) {
  if (c.major < 8) return {64, consumer ? 512.0 : 1024.0, 128};  // of fp16: it has no bf16
  if (c.major == 8 && c.minor == 0) return {64, 2048, 128};
  if (c.major == 9) return {128, 4096, 256};
  if (c.major == 10) return {128, 8192, 256};
  return {128, consumer ? 512.0 : 1024.0, 256};
}

struct Architecture {
  int number = 0;  // 86
  bool machine_code = true, ptx = true;
};

std::vector<Architecture> architectures(const std::string& code) {
  std::vector<Architecture> out;
  std::istringstream entries(code);
  for (std::string entry; std::getline(entries, entry, ',');) {
    Architecture one;
    std::from_chars(entry.data(), entry.data() + entry.size(), one.number);
    one.ptx = !entry.ends_with("-real");
    one.machine_code = !entry.ends_with("-virtual");
    if (one.number > 0) out.push_back(one);
  }
  return out;
}

}  // namespace

Gpu built_in_gpu(const std::string& name) {
  Gpu gpu;
  gpu.name = name;
  const std::string wanted = lower(name);
  if (wanted.find("laptop") != std::string::npos) return gpu;  // other chips under the same number
  for (const BuiltInGpu& known : kKnown) {
    if (!names(wanted, lower(known.name))) continue;
    gpu.memory_bytes = known.gigabytes * 1'000'000'000;
    gpu.processors = known.processors;
    if (wanted.find("pcie") == std::string::npos)
      gpu.peer_bandwidth = kReachedOfNvlink * known.peer_gb_per_second * 1e9;
    gpu.bf16_flops = known.bf16_tflops * 1e12;
    gpu.fp32_flops = known.fp32_tflops * 1e12;
    gpu.bandwidth = known.gb_per_second * 1e9;
    gpu.capability = known.capability;
    return gpu;
  }
  return gpu;
}

std::vector<std::string> built_in_gpu_names() {
  std::vector<std::string> out;
  for (const BuiltInGpu& known : kKnown) out.emplace_back(known.name);
  return out;
}

Gpu gpu_of(const std::string& name, const GpuFigures& f) {
  Gpu gpu = built_in_gpu(name);
  if (f.capability.known()) gpu.capability = f.capability;
  if (gpu.fp32_flops > 0 || !f.capability.known()) return gpu;
  // The largest clock is one that no card holds: published peaks are 0.8 to 0.93 of what it would give.
  constexpr double kHeld = 0.85;
  const PerClock per = per_clock(f.capability, lower(name).find("geforce") != std::string::npos);
  gpu.processors = f.cores / per.cores;
  const double clocks = kHeld * gpu.processors * f.clock_mhz * 1e6;
  gpu.bf16_flops = clocks * per.bf16_flops;
  gpu.fp32_flops = clocks * per.fp32_flops;
  gpu.bandwidth = 2.0 * f.memory_clock_mhz * 1e6 * f.bus_bits / 8;  // twice in a clock
  return gpu;
}

GpuObstacle gpu_obstacle(const ComputeCapability& c, const std::string& code) {
  if (!c.known()) return {};
  const std::string of = "compute capability " + c.text();
  if (c.major < 7 || (c.major == 7 && c.minor < 5)) {
    return {of + ": GPUs can train from 7.5 on (Turing: T4, RTX 20; with bf16 from 8.0 on)",
            "use a newer GPU, or --gpus 0 for the CPU"};
  }
  const std::vector<Architecture> held = architectures(code);
  if (held.empty()) return {};
  const int number = 10 * c.major + c.minor;
  std::string list;
  for (const Architecture& one : held) {
    // Machine code runs on later cards of its own generation, PTX on all later ones.
    const bool same = one.number / 10 == c.major && one.number <= number;
    if ((one.machine_code && same) || (one.ptx && one.number <= number)) return {};
    list +=
        (list.empty() ? "" : ", ") + std::to_string(one.number / 10) + "." + std::to_string(one.number % 10);
  }
  return {of + ", and lmlaunch-cuda holds code for " + list,
          "install a release, which has code for 7.5 to 12.0, or build on the machine with this card; --gpus "
          "0 uses the CPU"};
}

std::string gpu_code() {
  return LM_GPU_CODE;
}

}  // namespace lm
