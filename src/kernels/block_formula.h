// The elementwise formulas of a block's kernels and of the loss, shared by both launchers: V is float, or
// lanes of it; T is the element type of the arrays. Sums over a row are the launchers', which differ in the
// order. The GPU may contract a * b + c here.
#pragma once

#include <type_traits>

#include "base/host_device.h"
#include "kernels/kernels.h"

namespace lm {

// (a, b) rotated by the angle of cosine c and sine s. Both may hold a factor m (yarn's and longrope's): the
// result is m R (a, b). With -s it is m R^T (a, b), the gradient of that: it wants the factor, too, so what
// is rotated and rotated back has m² and is no longer what it was.
template <class V>
LM_HOST_DEVICE void rope_turn(V c, V s, V& a, V& b) {
  const V x = a, y = b;
  a = x * c - y * s;
  b = y * c + x * s;
}

LM_HOST_DEVICE float logarithm(float x) {
#if defined(__CUDA_ARCH__)
  return logf(x);
#else
  return __builtin_logf(x);
#endif
}
// What ScaleByPosition multiplies by, as an element of type T. In the first period it is 1.
template <class T>
LM_HOST_DEVICE float position_factor(int64_t position, int64_t period, float slope) {
  return round_as<T>(1.f + slope * logarithm(1.f + static_cast<float>(position / period)));
}

template <class V>
LM_HOST_DEVICE V sigmoid(V x) {
  return V(1.f) / (V(1.f) + exponential_to_infinity(V(0.f) - x));
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

// The scalar form of exponential.h's.
LM_HOST_DEVICE float hyperbolic_tangent(float x) {
#if defined(__CUDA_ARCH__)
  return tanhf(x);
#else
  return __builtin_tanhf(x);
#endif
}
// cap * tanh(ratio * logit): never more than the cap. ratio is the logits' scale / cap.
template <class V>
LM_HOST_DEVICE V soft_cap(V logit, V ratio, V cap) {
  return cap * hyperbolic_tangent(logit * ratio);
}
// Its derivative by ratio * cap * logit, from the capped logit: 1 - (logit / cap)², as a product, which is 0
// at the cap and loses nothing near it. inverse is 1 / cap².
template <class V>
LM_HOST_DEVICE V soft_cap_slope(V capped, V cap, V inverse) {
  return (cap - capped) * (cap + capped) * inverse;
}

// `is_target` is 1 for the row's target, else 0.
template <class V>
LM_HOST_DEVICE V softmax_gradient(V logit, V lse, V is_target, V scale) {
  return (exponential(logit - lse) - is_target) * scale;
}

}  // namespace lm
