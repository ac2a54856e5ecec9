// AnyPrecisionAdamW of torchdistx with bf16 for all that it keeps: AdamW on bf16 weights that have no master,
// with its moments in bf16 and Kahan's compensation of the weight's rounding, in bf16 too. Each operation on
// tensors rounds its result to bf16, R(); scalars are fp32:
//   p = R(p * (1 - lr * weight_decay)), with weight decay
//   m = R(fma(1 - beta1, g, R(beta1 * m)));  v = R(fma((1 - beta2) * g, g, R(beta2 * v)))
//   d = R(R(R(sqrt(v)) / root_correction2) + eps)
//   c = R(c + -step_size * m / d);  p' = R(p + c);  c = R(c + R(p - p'))
// with step_size = lr / c1, root_correction2 = sqrt(c2), c_i = 1 - beta_i^t. What of a step the weight is too
// coarse for stays in c, and is added again at the next one.
#pragma once

#include "optim/rules/adamw_scalars.h"

namespace lm {

struct AdamWAnyPrecision : AdamWScalars {
  static constexpr RuleText kText = {
      "adamw_anyprecision",
      "adamw_bf16 with Kahan's compensation of the rounding, in bf16, as torchdistx's AnyPrecisionAdamW"};
  static constexpr bool kNoMaster = true;
  static constexpr std::array kStateTensors = {StateTensor{"m", "first moment", DType::kBF16},
                                               StateTensor{"v", "second moment", DType::kBF16},
                                               StateTensor{"c", "compensation", DType::kBF16}};

  using Settings = AdamW::Settings;
  template <class S, class Key>
  static void keys(S& settings, const Key& key) {
    AdamW::keys(settings, key);
  }

  static AdamWAnyPrecision at(const Settings& settings, const RulePass& pass) {
    return {AdamWScalars::at(settings, pass)};
  }

  template <class V>
  LM_HOST_DEVICE void update(const AdamWAnyPrecision& c, V g, V* state, V& p) {
    const V m = round_as<Bf16>(fused(V(c.one_minus_beta1), g, round_as<Bf16>(V(c.beta1) * state[0])));
    const V v = round_as<Bf16>(fused(V(c.one_minus_beta2) * g, g, round_as<Bf16>(V(c.beta2) * state[1])));
    const V root_v = round_as<Bf16>(round_as<Bf16>(root(v)) / V(c.root_correction2));
    const V denominator = round_as<Bf16>(root_v + V(c.eps));
    const V before = round_as<Bf16>(p * V(c.decay));
    const V compensation = round_as<Bf16>(state[2] + V(c.minus_step_size) * m / denominator);
    p = round_as<Bf16>(before + compensation);
    state[0] = m;
    state[1] = v;
    state[2] = round_as<Bf16>(compensation + round_as<Bf16>(before - p));
  }
};

template <>
struct RuleAt<11> {
  using Rule = AdamWAnyPrecision;
};

}  // namespace lm
