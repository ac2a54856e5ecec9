// Rules whose state is in codes of the dynamic maps of 8 bits, on the CPU: a source of their own, since it
// has compiler options of its own (CMakeLists.txt).
#include "kernels/coded_blocks.h"

namespace lm::LM_ISA {

void update_dynamic8(const RuleUpdate& a, StreamView stream) {
  Rules::with(a.rule.id, [&](auto type) {
    using R = typename decltype(type)::type;
    if constexpr (kIsCoded<R>) {
      if constexpr (kIsDynamic8<R::kCodes[0]>) update_all_blocks<R>(a, stream);
    }
  });
}

}  // namespace lm::LM_ISA
