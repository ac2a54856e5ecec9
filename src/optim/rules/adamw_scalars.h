// The scalars of a pass of AdamW in the form in which torch's kernels have them: a negative step size, and a
// division by the root of the second moment's correction. Rules on bf16 weights share them.
#pragma once

#include <cmath>

#include "optim/rules/adamw.h"

namespace lm {

struct AdamWScalars {
  float beta1 = 0, one_minus_beta1 = 0, beta2 = 0, one_minus_beta2 = 0;
  float minus_step_size = 0, root_correction2 = 1, eps = 0;
  float decay = 1;  // 1 - lr * weight_decay

  static AdamWScalars at(const AdamW::Settings& settings, const RulePass& pass) {
    const double beta1 = settings.betas[0], beta2 = settings.betas[1], t = static_cast<double>(pass.t);
    const double c1 = 1 - std::pow(beta1, t), c2 = 1 - std::pow(beta2, t);
    return {.beta1 = static_cast<float>(beta1),
            .one_minus_beta1 = static_cast<float>(1 - beta1),
            .beta2 = static_cast<float>(beta2),
            .one_minus_beta2 = static_cast<float>(1 - beta2),
            .minus_step_size = static_cast<float>(-pass.lr / c1),
            .root_correction2 = static_cast<float>(std::sqrt(c2)),
            .eps = static_cast<float>(settings.eps),
            .decay = static_cast<float>(1 - pass.lr * pass.weight_decay)};
  }
};

}  // namespace lm
