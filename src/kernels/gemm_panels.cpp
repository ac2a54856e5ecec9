#include "kernels/gemm_panels.h"

#include <memory>

namespace lm {

GemmPanels& gemm_panels() {
  static thread_local const auto panels = std::make_unique_for_overwrite<GemmPanels>();
  return *panels;
}

bool library_multiplies_bf16() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return true;
#endif
}

}  // namespace lm
