// exp of sixteen lanes, compiled as they are (lanes.h).
#pragma once

#include "kernels/lanes.h"

namespace lm::LM_ISA {

// exp within one unit in the last place: 2^n * poly(r), r = x - n ln 2 in [-0.35, 0.35] (the coefficients
// are Cephes's). The argument is kept in [-87.33, 88.02], so the result is never 0 or infinite: 1.2e-38
// and 1.7e38 stand for them, which softmax and SwiGLU cannot tell apart. exp(NaN) is NaN. Bits differ between
// baseline and the rest.
LM_INLINE F32 exponential(F32 x) {
  x = min(F32(88.02f), max(F32(-87.33f), x));
  const F32 shift(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const F32 t = multiply_add(x, F32(1.44269504088896341f), shift);
  const F32 n = t - shift;
  const F32 r = multiply_add(n, F32(2.12194440e-4f), multiply_add(n, F32(-0.693359375f), x));
  F32 y = F32(1.9875691500e-4f);
  y = multiply_add(y, r, F32(1.3981999507e-3f));
  y = multiply_add(y, r, F32(8.3334519073e-3f));
  y = multiply_add(y, r, F32(4.1665795894e-2f));
  y = multiply_add(y, r, F32(1.6666665459e-1f));
  y = multiply_add(y, r, F32(5.0000001201e-1f));
  y = multiply_add(y, r * r, r) + F32(1.f);
  return y * float_of((bits_of(t) + U32(127)) << 23);
}
// The same, but infinite for infinity, as the GPU's is.
LM_INLINE F32 exponential_to_infinity(F32 x) {
  return select_less(F32(3.40282347e38f), x, x, exponential(x));
}

}  // namespace lm::LM_ISA
