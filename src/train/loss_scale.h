// The dynamic loss scale of fp16 training, by torch.amp.GradScaler's rule: gradients that are not finite cost
// the step and multiply the scale by `backoff`; `interval` steps in a row without such multiply it by
// `growth`. A value; every rank has the same one, because all decide by the same loss and norm.
#pragma once

#include <cmath>
#include <cstdint>

#include "config/config.h"

namespace lm {

struct LossScale {
  float scale = 1;        // of the next step
  int64_t good = 0;       // steps since it last changed
  int64_t overflows = 0;  // steps that were skipped, of the whole run
  bool operator==(const LossScale&) const = default;

  // Below this a scale is not why numbers exceed fp16's range: such a step counts as a bad one.
  static constexpr float kLeast = 1;

  // After a step. `finite`: so were its gradients.
  void observe(bool finite, const TrainConfig& config) {
    if (!finite) {
      scale = static_cast<float>(scale * config.loss_scale_backoff);
      good = 0;
      return;
    }
    if (++good < config.loss_scale_interval) return;
    const auto grown = static_cast<float>(scale * config.loss_scale_growth);
    if (std::isfinite(grown)) scale = grown;
    good = 0;
  }
};

}  // namespace lm
