// AdamW (Loshchilov and Hutter, "Decoupled weight decay regularization"), as torch.optim.AdamW:
//   m = fma(1 - beta1, g - m, m);  v = fma(beta2, v, (1 - beta2) * g * g)
//   p = p * (1 - lr * weight_decay);  p = p - step_size * m / (sqrt(v) * rsqrt_correction2 + eps)
// with step_size = lr / c1, rsqrt_correction2 = 1 / sqrt(c2), c_i = 1 - beta_i^t. fma where written, sqrt and
// / correctly rounded.
#pragma once

#include <cmath>
#include <vector>

#include "optim/rules/rule.h"

namespace lm {

struct AdamW {
  static constexpr RuleText kText = {"adamw", "Adam with decoupled weight decay"};
  static constexpr std::array kStateTensors = {StateTensor{"m", "first moment"},
                                               StateTensor{"v", "second moment"}};

  struct Settings {
    std::vector<double> betas = {0.9, 0.999};
    double eps = 1e-8;
  };
  template <class S, class Key>
  static void keys(S& settings, const Key& key) {
    key("betas", settings.betas, "decay of the first and second moment",
        Range{.low = 0, .high = 1, .high_open = true, .count = 2});
    key("eps", settings.eps, "added to the root of the second moment", kPositive);
  }

  float one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;
  float step_size = 0, rsqrt_correction2 = 1, eps = 0;
  float decay = 1;  // 1 - lr * weight_decay

  static AdamW at(const Settings& settings, const RulePass& pass) {
    const double beta1 = settings.betas[0], beta2 = settings.betas[1], t = static_cast<double>(pass.t);
    const double c1 = 1 - std::pow(beta1, t), c2 = 1 - std::pow(beta2, t);
    return {.one_minus_beta1 = static_cast<float>(1 - beta1),
            .beta2 = static_cast<float>(beta2),
            .one_minus_beta2 = static_cast<float>(1 - beta2),
            .step_size = static_cast<float>(pass.lr / c1),
            .rsqrt_correction2 = static_cast<float>(1 / std::sqrt(c2)),
            .eps = static_cast<float>(settings.eps),
            .decay = static_cast<float>(1 - pass.lr * pass.weight_decay)};
  }

  template <class V>
  LM_HOST_DEVICE void update(const AdamW& c, V g, V* state, V& p) {
    const V m = fused(V(c.one_minus_beta1), g - state[0], state[0]);
    const V v = fused(V(c.beta2), state[1], V(c.one_minus_beta2) * g * g);
    const V denominator = root(v) * V(c.rsqrt_correction2) + V(c.eps);
    p = p * V(c.decay) - V(c.step_size) * m / denominator;
    state[0] = m;
    state[1] = v;
  }
};

template <>
struct RuleAt<0> {
  using Rule = AdamW;
};

}  // namespace lm
