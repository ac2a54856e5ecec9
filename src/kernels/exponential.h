// exp and tanh of lanes (V: F32, or the Wide of wide_lanes.h), compiled per instruction set like these
// (lanes.h).
#pragma once

#include "kernels/wide_lanes.h"

namespace lm::LM_ISA {

// exp within one unit in the last place: 2^n * poly(r), r = x - n ln 2 in [-0.35, 0.35] (the coefficients
// are Cephes's). The argument is kept in [-87.33, 88.02], so the result is never 0 or infinite: 1.2e-38 and
// 1.7e38 are used instead, which makes no difference to softmax and SwiGLU. exp(NaN) is NaN. Bits differ
// between baseline and the rest.
template <class V>
LM_INLINE V exponential(V x) {
  x = min(V(88.02f), max(V(-87.33f), x));
  const V shift(kIntegerShift);
  const V t = multiply_add(x, V(1.44269504088896341f), shift);
  const V n = t - shift;
  const V r = multiply_add(n, V(2.12194440e-4f), multiply_add(n, V(-0.693359375f), x));
  V y = V(1.9875691500e-4f);
  y = multiply_add(y, r, V(1.3981999507e-3f));
  y = multiply_add(y, r, V(8.3334519073e-3f));
  y = multiply_add(y, r, V(4.1665795894e-2f));
  y = multiply_add(y, r, V(1.6666665459e-1f));
  y = multiply_add(y, r, V(5.0000001201e-1f));
  y = multiply_add(y, r * r, r) + V(1.f);
  return y * power_of_two(t);
}
// The same, but infinite for infinity, like the GPU's.
template <class V>
LM_INLINE V exponential_to_infinity(V x) {
  return select_less(V(3.40282347e38f), x, x, exponential(x));
}

// tanh within four units in the last place: near 0 an odd polynomial (Cephes's), so that small arguments keep
// their digits; elsewhere by exp, -1 and 1 at the ends. tanh(NaN) is NaN.
template <class V>
LM_INLINE V hyperbolic_tangent(V x) {
  const V square = x * x;
  V y = V(-5.70498872745e-3f);
  y = multiply_add(y, square, V(2.06390887954e-2f));
  y = multiply_add(y, square, V(-5.37397155531e-2f));
  y = multiply_add(y, square, V(1.33314422036e-1f));
  y = multiply_add(y, square, V(-3.33332819422e-1f));
  const V small = multiply_add(y, square * x, x);
  const V large = V(1.f) - V(2.f) / (V(1.f) + exponential(x + x));
  return select_less(square, V(0.390625f), small, large);
}

}  // namespace lm::LM_ISA
