// What a step's check decides, shared by the GPU's kernel and the CPU's.
#pragma once

#include "kernels/kernels.h"
#include "kernels/norms_formula.h"

namespace lm {

LM_HOST_DEVICE bool is_finite(double x) {
  return x - x == 0;
}
LM_HOST_DEVICE bool is_finite(float x) {
  return x - x == 0;
}

// min(1, limit / (norm + 1e-6)), also where the host decides (optim/gradients.h, clip_factor).
LM_HOST_DEVICE float clipped_scale(double norm, double limit) {
  const double clip = limit / (norm + 1e-6);
  return static_cast<float>(clip < 1.0 ? clip : 1.0);
}

// `square`: the sum of all blocks'.
LM_HOST_DEVICE StepDecision decision_of(const Decide& a, double square) {
  StepDecision d;
  d.loss = one_nan(a.divisor > 0 ? *a.nll / a.divisor : 0.0);
  d.correct = *a.correct;
  d.grad_norm = one_nan(root(square) / a.loss_scale);
  if (a.routers != nullptr) d.routers = *a.routers;
  d.skipped = is_finite(d.loss) && is_finite(d.grad_norm) ? 0 : 1;
  d.scale =
      static_cast<float>(static_cast<double>(clipped_scale(d.grad_norm, a.max_grad_norm)) / a.loss_scale);
  return d;
}

// The array that has the granule, which counts over all blocks.
LM_HOST_DEVICE const GradientArray& array_of(const Decide& a, int64_t granule) {
  int64_t i = a.array_count - 1;
  while (i > 0 && a.arrays[i].first_granule > granule) --i;
  return a.arrays[i];
}

}  // namespace lm
