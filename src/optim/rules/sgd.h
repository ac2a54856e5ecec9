// Stochastic gradient descent with momentum, or without and then without state, as torch.optim.SGD without
// dampening or Nesterov's step:
//   d = g + weight_decay * p;  m = momentum * m + d;  p = p - lr * m
// Each line after the first sum is one fma.
#pragma once

#include "optim/rules/rule.h"

namespace lm {

struct Sgd {
  static constexpr RuleText kText = {"sgd",
                                     "gradient descent with momentum; weight decay is added to the gradient"};
  static constexpr std::array kStateTensors = {StateTensor{"m", "momentum"}};

  struct Settings {
    double momentum = 0.9;
  };
  template <class S, class Key>
  static void keys(S& settings, const Key& key) {
    key("momentum", settings.momentum, "decay of the momentum; 0: no momentum, and no state", kFraction);
  }

  static bool stateless(const Settings& settings) { return settings.momentum == 0; }

  float lr = 0, momentum = 0, weight_decay = 0;

  static Sgd at(const Settings& settings, const RulePass& pass) {
    return {.lr = static_cast<float>(pass.lr),
            .momentum = static_cast<float>(settings.momentum),
            .weight_decay = static_cast<float>(pass.weight_decay)};
  }

  template <class V>
  LM_HOST_DEVICE void update(const Sgd& c, V g, V* state, V& p) {
    state[0] = fused(V(c.momentum), state[0], fused(V(c.weight_decay), p, g));
    p = fused(V(-c.lr), state[0], p);
  }
};

template <>
struct RuleAt<1> {
  using Rule = Sgd;
};

}  // namespace lm
