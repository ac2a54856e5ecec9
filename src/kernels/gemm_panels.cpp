#include "kernels/gemm_panels.h"

#include <memory>

namespace lm {

GemmPanels* gemm_panels(int threads) {
  static thread_local std::unique_ptr<GemmPanels[]> panels;
  static thread_local int count = 0;
  if (threads > count) {
    count = 0;
    panels.reset();
    panels = std::make_unique_for_overwrite<GemmPanels[]>(static_cast<size_t>(threads));
    count = threads;
  }
  return panels.get();
}

bool library_multiplies_bf16(Instructions best) {
#if defined(__x86_64__)
  return best >= Instructions::kAvx512Bf16;
#else
  return true;
#endif
}

}  // namespace lm
