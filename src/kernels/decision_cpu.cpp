// A step's check on the CPU: the reference of the GPU's.
#include "kernels/cpu_launchers.h"
#include "kernels/decision_formula.h"

namespace lm::LM_ISA {
namespace {

template <class G>
void find_element(const Decide& a, StepDecision& d) {
  const GradientArray& array = array_of(a, d.granule);
  const G* const granule =
      static_cast<const G*>(array.gradient) + (d.granule - array.first_granule) * kGranuleElements;
  for (int64_t i = 0; i < kGranuleElements; ++i) {
    const float x = to_float(granule[i]);
    if (is_finite(x)) continue;
    d.element = i;
    d.is_nan = x != x ? 1 : 0;
  }
}

}  // namespace

void decide(const Decide& a, StreamView) {
  double square = 0;
  for (int64_t b = 0; b < a.blocks; ++b) {
    double sum = 0;
    for (int64_t g = a.first_granule[b]; g < a.first_granule[b + 1]; ++g) sum += a.sums[g];
    a.squares[b] = sum;
    square += sum;
  }
  StepDecision d = decision_of(a, square);
  if (d.skipped != 0) {
    for (int64_t g = 0; g < a.first_granule[a.blocks]; ++g) {
      if (!is_finite(a.sums[g])) d.granule = g;
    }
    if (d.granule >= 0) {
      with_gradient_dtype("decide", a.gradient_dtype,
                          [&](auto gradient) { find_element<decltype(gradient)>(a, d); });
    }
  }
  *a.out = d;
}

}  // namespace lm::LM_ISA
