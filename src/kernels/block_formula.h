// The elementwise formulas of a block's kernels and of the loss, shared by both launchers: V is float, or
// lanes of it; T is the element type of the arrays. Sums over a row are the launchers', which differ in the
// order. The GPU may contract a * b + c here.
#pragma once

#include "base/host_device.h"

namespace lm {

// (a, b) rotated by the angle of cosine c and sine s.
template <class V>
LM_HOST_DEVICE void rope_turn(V c, V s, V& a, V& b) {
  const V x = a, y = b;
  a = x * c - y * s;
  b = y * c + x * s;
}

template <class V>
LM_HOST_DEVICE V sigmoid(V x) {
  return V(1.f) / (V(1.f) + exponential_to_infinity(V(0.f) - x));
}

// h = silu(gate) * up; the backward pass recomputes it, bit for bit. silu(-inf) is -inf * 0 = NaN, and so are
// its gradients, as in torch, on both launchers.
template <class T, class V>
LM_HOST_DEVICE V swiglu(V gate, V up) {
  return round_as<T>(gate * sigmoid(gate)) * up;
}
// In: gate, up and the gradient of h. Out: their gradients, and h in its place.
template <class T, class V>
LM_HOST_DEVICE void gated_backward_at(V& gate, V& up, V& dh) {
  const V x = gate, u = up, d = dh, s = sigmoid(x), silu = round_as<T>(x * s);
  dh = silu * u;
  up = d * silu;
  gate = d * u * (s * (V(1.f) + x * (V(1.f) - s)));
}

template <class T, class V>
LM_HOST_DEVICE V rms_norm_output(V x, V rstd, V weight) {
  return weight * round_as<T>(x * rstd);
}
// The gradient of x, where n = x * rstd and `mean` is that of weight * dy * n over the row.
template <class V>
LM_HOST_DEVICE V rms_norm_gradient(V n, V dy, V weight, V mean, V rstd) {
  return (weight * dy - n * mean) * rstd;
}

// `is_target` is 1 for the row's target, else 0.
template <class V>
LM_HOST_DEVICE V softmax_gradient(V logit, V lse, V is_target, V scale) {
  return (exponential(logit - lse) - is_target) * scale;
}

}  // namespace lm
