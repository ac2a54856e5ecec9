// The instruction sets that the CPU kernels are compiled for, and the launchers of each. `kernels(kCpu)` is
// cpu_kernels(cpu_level()); tests and benchmarks use other levels to compare. Any thread.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace lm {

// kAvx512 is F, BW, VL, DQ and VBMI (Ice Lake, Zen 4 and later). Without VBMI (kAvx512Core: Skylake, Cascade
// Lake) the kernels are those of AVX2, except products, which are all arithmetic.
enum class CpuLevel : uint8_t { kBaseline, kAvx2, kAvx512Core, kAvx512 };

// The highest level that this executable was built with and this processor has.
CpuLevel cpu_level();
const char* cpu_level_name(CpuLevel level);
// Throws Error(12) for a level above cpu_level().
const Kernels& cpu_kernels(CpuLevel level);

}  // namespace lm
