// The launchers of one instruction set as a table (compiled once for each, like every *_cpu.cpp here).
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {

extern const Kernels kTable;
const Kernels kTable = {
#define LM_KERNEL(name, Args) .name = name,
#define LM_CPU_KERNEL LM_KERNEL
#include "kernels/kernels.inc"
    .gemm = gemm,
    .chunk_sums = chunk_sums_cpu,
};

}  // namespace lm::LM_ISA
