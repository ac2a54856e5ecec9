// Adafactor (Shazeer and Stern, "Adafactor: adaptive learning rates with sublinear memory cost"), as in
// transformers, without a first moment:
//   beta2 = 1 - t^decay_rate;  direction /= max(1, rms(direction) / clip_threshold)
//   lr *= min(0.01, 1 / sqrt(t)) with relative_step (min(1e-6 * t, 1 / sqrt(t)) with warmup_init),
//   lr *= max(eps[1], rms(p)) with scale_parameter;  p = p * (1 - lr * weight_decay) - lr * direction
// transformers' lr = None is lr = 1 here.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "optim/rules/factored.h"

namespace lm {

struct Adafactor {
  static constexpr RuleText kText = {
      "adafactor", "factored second moments: hardly any state; as transformers' Adafactor", true};
  static constexpr bool kFactored = true;
  static constexpr auto kStateTensors = factored_state_tensors(DType::kF32);

  struct Settings {
    std::vector<double> eps = {1e-30, 1e-3};
    double clip_threshold = 1;
    double decay_rate = -0.8;
    bool scale_parameter = false;
    bool relative_step = false;
    bool warmup_init = false;
  };
  template <class S, class Key>
  static void keys(S& settings, const Key& key) {
    key("eps", settings.eps, "added to a gradient's square, and the least size of weights that a step counts",
        Range{.low = 0, .high = 1, .low_open = true, .count = 2});
    key("clip_threshold", settings.clip_threshold,
        "a matrix's update is scaled down to this root mean square, in units of lr", kPositive);
    key("decay_rate", settings.decay_rate, "the second moments' decay is 1 - t^decay_rate at step t",
        Range{.low = -10, .high = 0, .high_open = true});
    key("scale_parameter", settings.scale_parameter,
        "lr counts relative to the root mean square of each matrix's weights", Range{});
    key("relative_step", settings.relative_step,
        "lr is multiplied by min(0.01, 1/sqrt(t)) at step t: set it to 1 for transformers' lr=None", Range{});
    key("warmup_init", settings.warmup_init, "with relative_step: by min(1e-6 t, 1/sqrt(t))", Range{});
  }

  float beta2 = 0, one_minus_beta2 = 0, square_eps = 0, root_eps = 0;
  float lr = 0, weight_decay = 0, clip_threshold = 1;
  float least_weights = -1;  // lower bound of the weights' root mean square; < 0: not used

  static Adafactor at(const Settings& settings, const RulePass& pass) {
    const auto t = static_cast<double>(pass.t);
    const double beta2 = 1 - std::pow(t, settings.decay_rate);
    const double most = settings.warmup_init ? 1e-6 * t : 1e-2;
    const double lr = pass.lr * (settings.relative_step ? std::min(most, 1 / std::sqrt(t)) : 1);
    return {.beta2 = static_cast<float>(beta2),
            .one_minus_beta2 = static_cast<float>(1 - beta2),
            .square_eps = static_cast<float>(settings.eps[0]),
            .lr = static_cast<float>(lr),
            .weight_decay = static_cast<float>(pass.weight_decay),
            .clip_threshold = static_cast<float>(settings.clip_threshold),
            .least_weights = settings.scale_parameter ? static_cast<float>(settings.eps[1]) : -1};
  }

  LM_HOST_DEVICE bool counts_weights(const Adafactor& c) { return !(c.least_weights < 0); }
  LM_HOST_DEVICE FactoredStep step(const Adafactor& c, const FactoredSums& sums) {
    const float size = root(sums.directions / sums.elements) / c.clip_threshold;
    const float of_weights = root(sums.weights / sums.elements);
    float lr = c.lr;
    if (counts_weights(c)) lr = lr * select_less(of_weights, c.least_weights, c.least_weights, of_weights);
    return {.factor = lr / select_less(size, 1.f, 1.f, size), .decay = 1.f - lr * c.weight_decay};
  }
};

template <>
struct RuleAt<5> {
  using Rule = Adafactor;
};

}  // namespace lm
