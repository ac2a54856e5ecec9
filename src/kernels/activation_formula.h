// The activation functions of MLPs and their derivatives, shared by both launchers: V is float, or lanes of
// it, as in block_formula.h.
#pragma once

#include <type_traits>

#include "base/activation.h"
#include "kernels/block_formula.h"

namespace lm {

// Calls body(std::integral_constant<Activation, kind>{}).
template <class Body>
LM_INLINE void with_activation(Activation kind, const Body& body) {
  switch (kind) {
    case Activation::kSilu:
      return body(std::integral_constant<Activation, Activation::kSilu>{});
    case Activation::kGeluTanh:
      return body(std::integral_constant<Activation, Activation::kGeluTanh>{});
    case Activation::kRelu2:
      return body(std::integral_constant<Activation, Activation::kRelu2>{});
    case Activation::kRelu:
      return body(std::integral_constant<Activation, Activation::kRelu>{});
  }
}

// activation(x), and its derivative into `slope`. Infinite x give what torch gives, on both launchers:
//   silu, gelu_tanh  -inf is -inf * 0 = NaN, inf is inf; both slopes are inf * 0 = NaN
//   relu2            -inf is 0, its slope too; inf is inf, its slope too
//   relu             -inf is 0, its slope too; inf is inf, its slope 1. At 0 the slope is 0
// gelu_tanh's slope has x² in it, which is infinite from |x| = 1.8e19 on: NaN, as torch's.
template <Activation kind, class V>
LM_HOST_DEVICE V activated(V x, V& slope) {
  if constexpr (kind == Activation::kSilu) {
    const V s = sigmoid(x);
    slope = s * (V(1.f) + x * (V(1.f) - s));
    return x * s;
  } else if constexpr (kind == Activation::kGeluTanh) {
    // With v = 2 sqrt(2/pi) (x + 0.044715 x³) and s = sigmoid(v), (1 + tanh(v/2)) / 2 is s and 1 - tanh² is
    // 4 s (1 - s): no tanh, and far left of 0 s is accurate where 1 + tanh would have lost all digits. Below
    // -88 it is 0: the CPU's exponential ends there, and what it leaves of s, times x³, is no small number
    // from -1e12 on.
    const V square = x * x, v = x * (V(1.5957691216f) + V(0.0713548163f) * square);
    const V s = select_less(v, V(-88.f), V(0.f), sigmoid(v));
    slope = s + x * (s * (V(1.f) - s)) * (V(1.5957691216f) + V(0.2140644488f) * square);
    return x * s;
  } else {
    static_assert(kind == Activation::kRelu2 || kind == Activation::kRelu);
    const V positive = select_less(x, V(0.f), V(0.f), x);  // a NaN stays one
    if constexpr (kind == Activation::kRelu) {
      slope = select_less(V(0.f), x, V(1.f), V(0.f));
      return positive;
    } else {
      slope = positive + positive;
      return positive * positive;
    }
  }
}

// h = activation(gate) * up; the backward pass makes it again, bit for bit.
template <Activation kind, class T, class V>
LM_HOST_DEVICE V gated(V gate, V up) {
  V slope;
  return round_as<T>(activated<kind>(gate, slope)) * up;
}
// In: gate, up and the gradient of h. Out: their gradients, and h in its place.
template <Activation kind, class T, class V>
LM_HOST_DEVICE void gated_backward_at(V& gate, V& up, V& dh) {
  const V u = up, d = dh;
  V slope;
  const V a = round_as<T>(activated<kind>(gate, slope));
  dh = a * u;
  up = d * a;
  gate = d * u * slope;
}

// The same of h = activation(x).
template <Activation kind, class V>
LM_HOST_DEVICE void activation_backward_at(V& x, V& dh) {
  V slope;
  const V h = activated<kind>(x, slope);
  x = dh * slope;
  dh = h;
}

}  // namespace lm
