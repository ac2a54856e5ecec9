// Which CPU table a processor gets.
#include "kernels/cpu_features.h"

#include <string>

#include "base/error.h"
#include "base/processor.h"
#include "kernels/cpu_launchers.h"

namespace lm {

namespace baseline {
extern const Kernels kTable;
}
#if defined(LM_X86_LEVELS)
namespace avx2 {
extern const Kernels kTable;
}
namespace avx512_core {
void gemm(const Gemm&, StreamView);
}
namespace avx512 {
extern const Kernels kTable;
}
#endif

CpuLevel cpu_level() {
#if defined(LM_X86_LEVELS)
  if (has_instructions(Instructions::kAvx512Vbmi)) return CpuLevel::kAvx512;
  if (has_instructions(Instructions::kAvx512Core)) return CpuLevel::kAvx512Core;
  if (has_instructions(Instructions::kAvx2)) return CpuLevel::kAvx2;
#endif
  return CpuLevel::kBaseline;
}

const char* cpu_level_name(CpuLevel level) {
  switch (level) {
    case CpuLevel::kAvx512:
      return "avx512";
    case CpuLevel::kAvx512Core:
      return "avx512_core";
    case CpuLevel::kAvx2:
      return "avx2";
    default:
      return "baseline";
  }
}

const Kernels& cpu_kernels(CpuLevel level) {
  if (level > cpu_level()) {
    throw Error(Exit::kDoesNotFit, {.area = "CPU-35",
                                    .what = std::string("kernels for ") + cpu_level_name(level) +
                                            " on a processor with " + cpu_level_name(cpu_level()),
                                    .place = "",
                                    .next = "ask for cpu_level() or less"});
  }
#if defined(LM_X86_LEVELS)
  static const Kernels core = [] {
    Kernels table = avx2::kTable;
    table.gemm = avx512_core::gemm;
    return table;
  }();
  if (level == CpuLevel::kAvx512) return avx512::kTable;
  if (level == CpuLevel::kAvx512Core) return core;
  if (level == CpuLevel::kAvx2) return avx2::kTable;
#endif
  return baseline::kTable;
}

void refuse_arguments(const char* kernel, const char* why) {
  throw Error(Exit::kInternal, {.area = "KERNEL-70",
                                .what = std::string("kernel ") + kernel + ": " + why,
                                .place = "",
                                .next = "this is a mistake of the program; please report it"});
}
void refuse_dtype(const char* kernel, DType type) {
  refuse_arguments(kernel, (std::string("no form for ") + dtype_name(type)).c_str());
}

}  // namespace lm
