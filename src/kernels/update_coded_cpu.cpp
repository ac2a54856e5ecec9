// Rules whose state is in codes, on the CPU (those of 8-bit dynamic maps: update_dynamic8_cpu.cpp).
#include "kernels/coded_blocks.h"

namespace lm::LM_ISA {

void update_coded(const RuleUpdate& a, StreamView stream) {
  if (a.elements % kCodeBlock != 0) refuse_arguments("update", "coded elements are no multiple of 256");
  Rules::with(a.rule.id, [&](auto type) {
    using R = typename decltype(type)::type;
    if constexpr (!kIsCoded<R>) {
      refuse_arguments("update", "codes of a rule that has none");
    } else if constexpr (kIsDynamic8<R::kCodes[0]>) {
      update_dynamic8(a, stream);
    } else {
      update_all_blocks<R>(a, stream);
    }
  });
}

}  // namespace lm::LM_ISA
