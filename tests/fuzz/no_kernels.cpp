// The parsers' side of the kernels, which come once per instruction set and in builds of their own: what is
// read here is never computed with.
#include <cstdlib>

#include "kernels/cpu_features.h"
#include "kernels/kernels.h"

namespace lm {

CpuLevel cpu_level() {
  return CpuLevel{};
}

const Kernels& cpu_kernels(CpuLevel) {
  std::abort();
}

}  // namespace lm
