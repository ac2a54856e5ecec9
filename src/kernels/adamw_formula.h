// One element of AdamW with every operation fixed (kernels.h), and the three ways in which its fp32 weight
// lives beside a bf16 one. V is float, or lanes of it; U the unsigned integers of the same size. Both
// launchers and the tests' scalar reference use these lines; the compiler may contract nothing
// (-ffp-contract=off, -fmad=false).
#pragma once

#include "base/host_device.h"
#include "base/philox.h"
#include "kernels/kernels.h"

namespace lm {

// The scalars of a pass, copied out of the arguments so that stores through m and v cannot change them.
template <class V>
struct AdamWConstants {
  V gradient_scale, one_minus_beta1, beta2, one_minus_beta2, step_size, rsqrt_correction2, eps, decay;
};

template <class V>
LM_HOST_DEVICE AdamWConstants<V> adamw_constants(const AdamW& a) {
  return {V(a.gradient_scale), V(a.one_minus_beta1),   V(a.beta2), V(a.one_minus_beta2),
          V(a.step_size),      V(a.rsqrt_correction2), V(a.eps),   V(a.decay)};
}

// Every NaN that is stored is 0x7FC00000: processors differ in which operand's NaN they pass on.
template <class V>
LM_HOST_DEVICE void adamw_update(const AdamWConstants<V>& c, V gradient, V& m, V& v, V& p) {
  const V g = gradient * c.gradient_scale;
  const V new_m = fused(c.one_minus_beta1, g - m, m);
  const V new_v = fused(c.beta2, v, c.one_minus_beta2 * g * g);
  const V denominator = root(new_v) * c.rsqrt_correction2 + c.eps;
  p = one_nan(p * c.decay - c.step_size * new_m / denominator);
  m = one_nan(new_m);
  v = one_nan(new_v);
}

// Split master: bits M, working weight (M + 0x8000) >> 16, and M & 0xFFFF beside it.
template <class U>
LM_HOST_DEVICE U split_weight(U master) {
  return (master + U(0x8000)) >> 16;
}
template <class U>
LM_HOST_DEVICE U split_low(U master) {
  return master & U(0xFFFF);
}
template <class U>
LM_HOST_DEVICE U split_join(U weight, U low) {
  return ((weight - (low >> 15)) << 16) | low;
}

// Stochastic rounding to bf16 with the low 16 bits of a random number. NaN must be 0x7FC00000 already; it and
// infinity have no low bits, so nothing carries into them.
template <class U>
LM_HOST_DEVICE U stochastic_weight(U master, U random) {
  return (master + (random & U(0xFFFF))) >> 16;
}

}  // namespace lm
