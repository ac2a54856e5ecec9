// The elementwise formulas of a block's kernels and of the loss, shared by both launchers: V is float, or
// lanes of it; T is the element type of the arrays. Sums over a row are the launchers', which differ in the
// order. The GPU may contract a * b + c here.
#pragma once

#include <type_traits>

#include "base/host_device.h"
#include "kernels/kernels.h"

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

// Calls body(a std::integral_constant of `form`), on the host.
template <class Body>
LM_INLINE void with_form(WeightForm form, const Body& body) {
  switch (form) {
    case WeightForm::kAfterRounding:
      return body(std::integral_constant<WeightForm, WeightForm::kAfterRounding>{});
    case WeightForm::kBeforeRounding:
      return body(std::integral_constant<WeightForm, WeightForm::kBeforeRounding>{});
    case WeightForm::kOffset:
      return body(std::integral_constant<WeightForm, WeightForm::kOffset>{});
  }
}
// What a norm multiplies its normalised input by.
template <WeightForm kForm, class V>
LM_HOST_DEVICE V norm_factor(V weight) {
  if constexpr (kForm == WeightForm::kOffset) {
    return V(1.f) + weight;
  } else {
    return weight;
  }
}
// The normalised input n as that factor meets it, and so as the weight's gradient has it.
template <class T, WeightForm kForm, class V>
LM_HOST_DEVICE V norm_input(V n) {
  if constexpr (kForm == WeightForm::kAfterRounding) {
    return round_as<T>(n);
  } else {
    return n;
  }
}
// `output`, a norm's, times `factor`, added to `add_to`; `scaled` is false where the factor is 1.
template <class T, class V>
LM_HOST_DEVICE V norm_added(V add_to, V output, V factor, bool scaled) {
  V y = round_as<T>(output);
  if (scaled) y = round_as<T>(factor * y);
  return add_to + y;
}
// The gradient of x, where n = x * rstd, `factor` is norm_factor's, and `mean` is that of factor * dy * n
// over the row.
template <class V>
LM_HOST_DEVICE V rms_norm_gradient(V n, V dy, V factor, V mean, V rstd) {
  return (factor * dy - n * mean) * rstd;
}
// The same of n = (x - its mean) * rstd, with d = factor * dy and its mean over the row, too.
template <class V>
LM_HOST_DEVICE V layer_norm_gradient(V n, V d, V mean, V mean_of_products, V rstd) {
  return (d - mean - n * mean_of_products) * rstd;
}

// `is_target` is 1 for the row's target, else 0.
template <class V>
LM_HOST_DEVICE V softmax_gradient(V logit, V lse, V is_target, V scale) {
  return (exponential(logit - lse) - is_target) * scale;
}

}  // namespace lm
