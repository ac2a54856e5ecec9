// The final norm, the vocabulary projection and the cross-entropy, forward and backward in one go, in chunks
// of rows: logits of the whole batch never exist. Rows without a target are dropped before the norm. The
// vocabulary is walked in segments of 8192 rows in order: (max, sum) combine per segment, dX is added per
// segment in fp32, so that slicing the matrix never changes a bit.
#pragma once

#include "model/linear.h"
#include "spec/block_layout.h"

namespace lm {

struct Head {
  Param norm;    // [H]
  Param weight;  // [V, H]; the embedding's matrix when tied
};

struct LossOptions {
  int64_t row_chunk = 512;  // rows of logits at once; numerics: fixed by the plan
  float scale = 1;          // 1 / target tokens of the whole optimizer step
  bool first = false;       // the step's first micro-batch: gradients are overwritten
};

// *nll_sum (fp64, device memory) += sum of nll over the batch's targets. With `dx` [T, H] defined it becomes
// the gradient of x [T, H] and the head's gradients are added; undefined: evaluation.
void head_loss(const Context& context, const Head& head, const DeviceBatch& batch, const at::Tensor& x,
               const at::Tensor& dx, double* nll_sum, const LossOptions& options);

// logits [rows, V] of the final norm of x [rows, H]: for generation and tests.
void head_logits(const Context& context, const Head& head, const at::Tensor& x, const at::Tensor& logits);

}  // namespace lm
