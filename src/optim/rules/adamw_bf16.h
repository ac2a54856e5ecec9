// AdamW on bf16 weights that have no master, with its moments in bf16, as torch.optim.AdamW(fused=True) on a
// bf16 parameter: each element is computed in fp32 from bf16 numbers, and the new moments and the weight are
// rounded at the end, so that the weight moves by the moments before their rounding.
//   m = fma(1 - beta1, g - m, m);  v = fma((1 - beta2) * g, g, beta2 * v)
//   p = p * (1 - lr * weight_decay) + -step_size * m / (sqrt(v) / root_correction2 + eps)
// with step_size = lr / c1, root_correction2 = sqrt(c2), c_i = 1 - beta_i^t: torch's operations, in its
// order.
#pragma once

#include "optim/rules/adamw_scalars.h"

namespace lm {

struct AdamWBf16 : AdamWScalars {
  static constexpr RuleText kText = {
      "adamw_bf16",
      "adamw with bf16 moments, on bf16 weights without master weights, as torch's fused AdamW"};
  static constexpr bool kNoMaster = true;
  static constexpr std::array kStateTensors = {StateTensor{"m", "first moment", DType::kBF16},
                                               StateTensor{"v", "second moment", DType::kBF16}};

  struct Settings : AdamW::Settings {
    Rounding rounding = Rounding::kNearest;
  };
  template <class S, class Key>
  static void keys(S& settings, const Key& key) {
    AdamW::keys(settings, key);
    key("rounding", settings.rounding,
        "rounding of the new weights to bf16; stochastic keeps small steps on average", Range{});
  }

  static AdamWBf16 at(const Settings& settings, const RulePass& pass) {
    return {AdamWScalars::at(settings, pass)};
  }

  template <class V>
  LM_HOST_DEVICE void update(const AdamWBf16& c, V g, V* state, V& p) {
    const V m = fused(V(c.one_minus_beta1), g - state[0], state[0]);
    const V v = fused(V(c.one_minus_beta2) * g, g, V(c.beta2) * state[1]);
    const V denominator = root(v) / V(c.root_correction2) + V(c.eps);
    p = p * V(c.decay) + V(c.minus_step_size) * m / denominator;
    state[0] = m;
    state[1] = v;
  }
};

template <>
struct RuleAt<10> {
  using Rule = AdamWBf16;
};

}  // namespace lm
