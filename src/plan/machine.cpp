#include "plan/machine.h"

#include <array>

#include "base/bytes.h"

namespace lm {
namespace {

struct KnownGpu {
  const char* name;
  double bf16_tflops, fp32_tflops, gb_per_second;
  int64_t gib;
};

// Dense peaks (never the sparse ones), as published; more specific names first.
constexpr std::array<KnownGpu, 14> kKnown = {{
    {"B200", 2250, 75, 8000, 180},
    {"H200", 989.4, 66.9, 4800, 141},
    {"H100 PCIe", 756, 51, 2000, 80},
    {"H100", 989.4, 66.9, 3350, 80},
    {"A100-SXM4-40GB", 312, 19.5, 1555, 40},
    {"A100", 312, 19.5, 2039, 80},
    {"L40S", 362, 91.6, 864, 48},
    {"RTX 6000 Ada", 364, 91.1, 960, 48},
    {"RTX 5090", 209.5, 104.8, 1792, 32},
    {"RTX 4090", 165.2, 82.6, 1008, 24},
    {"RTX 3090", 71, 35.6, 936, 24},
    {"A6000", 155, 38.7, 768, 48},
    {"A10", 125, 31.2, 600, 24},
    {"L4", 121, 30.3, 300, 24},
}};

}  // namespace

Gpu known_gpu(const std::string& name) {
  for (const KnownGpu& known : kKnown) {
    if (name.find(known.name) == std::string::npos) continue;
    return {.name = name, .memory_bytes = known.gib * kGiB, .bf16_flops = known.bf16_tflops * 1e12,
            .fp32_flops = known.fp32_tflops * 1e12, .bandwidth = known.gb_per_second * 1e9};
  }
  return {.name = name};
}

}  // namespace lm
