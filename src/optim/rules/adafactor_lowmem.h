// Adafactor for the least memory: factored second moments in bf16, and every matrix moves by lr times its
// norm:
//   beta2 = 0.99, no correction of its bias;  p = p * (1 - lr * weight_decay) - lr * |p| / |direction| *
//   direction
// with the norms over the matrix, |p| with a root mean square of at least 0.001, so that zero matrices move
// too.
#pragma once

#include "optim/rules/factored.h"

namespace lm {

struct AdafactorLowmem {
  static constexpr RuleText kText = {
      "adafactor_lowmem",
      "adafactor with second moments in bf16; a step moves each matrix by lr times its norm: try lr = 1e-4",
      true};
  static constexpr bool kFactored = true;
  static constexpr auto kStateTensors = factored_state_tensors(DType::kBF16);

  struct Settings {
    double beta2 = 0.99;
  };
  template <class S, class Key>
  static void keys(S& settings, const Key& key) {
    key("beta2", settings.beta2, "decay of the second moments",
        Range{.low = 0, .high = 1, .high_open = true});
  }

  float beta2 = 0, one_minus_beta2 = 0, square_eps = 0, root_eps = 1e-30f;
  float lr = 0, decay = 1;

  static AdafactorLowmem at(const Settings& settings, const RulePass& pass) {
    return {.beta2 = static_cast<float>(settings.beta2),
            .one_minus_beta2 = static_cast<float>(1 - settings.beta2),
            .lr = static_cast<float>(pass.lr),
            .decay = static_cast<float>(1 - pass.lr * pass.weight_decay)};
  }

  LM_HOST_DEVICE bool counts_weights(const AdafactorLowmem&) { return true; }
  LM_HOST_DEVICE FactoredStep step(const AdafactorLowmem& c, const FactoredSums& sums) {
    const float size = root(sums.weights), least = 1e-3f * root(sums.elements);
    return {.factor = c.lr * (select_less(size, least, least, size) / (root(sums.directions) + 1e-20f)),
            .decay = c.decay};
  }
};

template <>
struct RuleAt<6> {
  using Rule = AdafactorLowmem;
};

}  // namespace lm
