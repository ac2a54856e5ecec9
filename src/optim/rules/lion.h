// Lion (Chen and others, "Symbolic discovery of optimization algorithms"):
//   c = fma(1 - beta1, g - m, m);  p = p * (1 - lr * weight_decay);  p = p - lr * sign(c)
//   m = fma(1 - beta2, g - m, m)
// The sign of 0 and of NaN is 0.
#pragma once

#include <vector>

#include "optim/rules/rule.h"

namespace lm {

struct Lion {
  static constexpr RuleText kText = {
      "lion", "the sign of a momentum, with decoupled weight decay: wants a lower lr than adamw"};
  static constexpr std::array kStateTensors = {StateTensor{"m", "momentum"}};

  struct Settings {
    std::vector<double> betas = {0.9, 0.99};
  };
  template <class S, class Key>
  static void keys(S& settings, const Key& key) {
    key("betas", settings.betas, "weight of the momentum in the step, and its decay",
        Range{.low = 0, .high = 1, .high_open = true, .count = 2});
  }

  float one_minus_beta1 = 0, one_minus_beta2 = 0;
  float lr = 0;
  float decay = 1;  // 1 - lr * weight_decay

  static Lion at(const Settings& settings, const RulePass& pass) {
    return {.one_minus_beta1 = static_cast<float>(1 - settings.betas[0]),
            .one_minus_beta2 = static_cast<float>(1 - settings.betas[1]),
            .lr = static_cast<float>(pass.lr),
            .decay = static_cast<float>(1 - pass.lr * pass.weight_decay)};
  }

  template <class V>
  LM_HOST_DEVICE void update(const Lion& c, V g, V* state, V& p) {
    const V towards = g - state[0], zero(0.f), lr(c.lr);
    const V direction = fused(V(c.one_minus_beta1), towards, state[0]);
    p = p * V(c.decay) - select_less(zero, direction, lr, select_less(direction, zero, zero - lr, zero));
    state[0] = fused(V(c.one_minus_beta2), towards, state[0]);
  }
};

template <>
struct RuleAt<2> {
  using Rule = Lion;
};

}  // namespace lm
