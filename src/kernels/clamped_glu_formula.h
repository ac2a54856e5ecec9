// The clamped GLU (clamped_glu_arguments.h) and its gradients, shared by both launchers: V is float, or lanes
// of it, as in block_formula.h.
#pragma once

#include "kernels/block_formula.h"

namespace lm {

// The limited ones, and s = sigmoid(alpha g).
template <class V>
struct LimitedGlu {
  V g, u, s;
};
template <class V>
LM_HOST_DEVICE LimitedGlu<V> limited_glu(V gate, V up, V alpha, V limit) {
  const V least = V(0.f) - limit;
  LimitedGlu<V> out;
  out.g = select_less(limit, gate, limit, gate);  // a NaN stays one
  out.u = select_less(limit, up, limit, select_less(up, least, least, up));
  out.s = sigmoid(alpha * out.g);
  return out;
}
template <class V>
LM_HOST_DEVICE V glu_of(const LimitedGlu<V>& x) {
  return (x.u + V(1.f)) * (x.g * x.s);
}

template <class V>
LM_HOST_DEVICE V clamped_glu(V gate, V up, V alpha, V limit) {
  return glu_of(limited_glu(gate, up, alpha, limit));
}
// In: gate, up and the gradient of h. Out: their gradients, and h in its place.
template <class V>
LM_HOST_DEVICE void clamped_glu_backward_at(V& gate, V& up, V& dh, V alpha, V limit) {
  const V x = gate, y = up, d = dh, zero(0.f), one(1.f), least = zero - limit;
  const LimitedGlu<V> of = limited_glu(x, y, alpha, limit);
  const V of_gate = d * (of.u + one) * (of.s + alpha * of.g * (of.s * (one - of.s)));
  const V of_up = d * (of.g * of.s);
  gate = select_less(limit, x, zero, of_gate);
  up = select_less(limit, y, zero, select_less(y, least, zero, of_up));
  dh = glu_of(of);
}

}  // namespace lm
