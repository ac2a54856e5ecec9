// What a step's check decides, shared by the GPU's kernel and the CPU's.
#pragma once

#include "base/host_device.h"
#include "kernels/kernels.h"

namespace lm {

LM_HOST_DEVICE bool is_finite(double x) {
  return x - x == 0;
}
LM_HOST_DEVICE bool is_finite(float x) {
  return x - x == 0;
}

LM_HOST_DEVICE double root_of(double x) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(x);
#else
  return __builtin_sqrt(x);
#endif
}
// Every NaN has the same bits.
LM_HOST_DEVICE double one_nan(double x) {
  if (x == x) return x;
  const uint64_t bits = 0x7FF8000000000000u;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// `square`: the sum of all blocks'. As Gradients' clip_factor, and the loss scale's inverse.
LM_HOST_DEVICE StepDecision decision_of(const Decide& a, double square) {
  StepDecision d;
  d.loss = one_nan(a.divisor > 0 ? *a.nll / a.divisor : 0.0);
  d.correct = *a.correct;
  d.grad_norm = one_nan(root_of(square) / a.loss_scale);
  d.skipped = is_finite(d.loss) && is_finite(d.grad_norm) ? 0 : 1;
  const double clip = a.max_grad_norm / (d.grad_norm + 1e-6);
  d.scale =
      static_cast<float>(static_cast<double>(static_cast<float>(clip < 1.0 ? clip : 1.0)) / a.loss_scale);
  return d;
}

// The array that has the granule, which counts over all blocks.
LM_HOST_DEVICE const GradientArray& array_of(const Decide& a, int64_t granule) {
  int64_t i = a.array_count - 1;
  while (i > 0 && a.arrays[i].first_granule > granule) --i;
  return a.arrays[i];
}

}  // namespace lm
