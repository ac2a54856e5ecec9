// The final norm, the vocabulary projection and the cross-entropy, forward and backward in chunks of rows:
// logits of the whole batch never exist. Rows without a target are dropped before the norm; each of the
// others has a weight in the loss (TargetRows) and may give its nll by itself. The vocabulary is walked in
// segments of 8192 rows in order: (max, sum) combine per segment, dX is added per segment in fp32, so that
// cutting the matrix never changes a bit. A model's factor and cap of its logits (HeadSpec) follow each
// segment's product, wherever that is made.
//
// A head whose matrix is there as a whole does all of it in one go (head_loss: row chunks outside, segments
// inside, three GEMMs). Of one whose segments come one after another the steps are taken singly: begin,
// forward of each segment, backward of each segment, finish; the logits are computed twice, in four GEMMs.
// So they are where the gradient of a whole matrix is made later than the rest (head_weight_gradient).
#pragma once

#include "model/norm.h"
#include "spec/block_layout.h"

namespace lm {

struct Head {
  Norm norm;     // [H]
  Param weight;  // [V, H]; the embedding's matrix when tied
};

// Rows [first_row, first_row + weight's rows) of the matrix.
struct HeadSegment {
  Param weight;  // [S, H]
  int64_t first_row = 0;
};

struct LossOptions {
  int64_t row_chunk = 512;  // rows of logits at once; numerics: fixed by the plan
  float scale = 1;          // 1 / sum of the target rows' weights in the whole optimizer step
  bool backward = false;    // gradients of parameters are wanted even where that of x is not
  bool first = false;       // the step's first micro-batch: gradients are overwritten
  float* nll = nullptr;     // [R] fp32 in device memory: of each target row; null when not wanted
  // Memory for what head_weight_gradient wants: normed, max and sum. Null: nobody does.
  const struct HeadRows* keep = nullptr;
};

// *nll_sum (fp64, device memory) += sum of weight * nll over the batch's targets. With `dx` [T, H] defined it
// becomes the gradient of x [T, H] and the head's gradients are added; undefined: evaluation, or
// with `backward` the head's gradients alone.
void head_loss(const Context& context, const Head& head, const DeviceBatch& batch, const View& x,
               const View& dx, double* nll_sum, const LossOptions& options);

// What a micro-batch keeps between the steps of a cut head, in arena order.
struct HeadRows {
  TargetRows targets;
  View normed;                  // [R', H]: R rounded up; in training it waits in dx until the end
  View rstd;                    // [R] fp32
  View max, sum, target_logit;  // [R] fp32
  View dx_sum;                  // [R', H] fp32; undefined where nobody wants the final norm's backward
};
HeadRows head_begin(const Context& context, const Norm& norm, const DeviceBatch& batch, const View& x,
                    const View& dx, bool backward);
// The last segment completes the softmax and adds to *nll_sum.
void head_segment_forward(const Context& context, const HeadSegment& segment, const HeadRows& rows,
                          double* nll_sum, const LossOptions& options);
void head_segment_backward(const Context& context, const HeadSegment& segment, const HeadRows& rows,
                           const LossOptions& options);
// `x` is head_begin's, and dx becomes its gradient; undefined: nobody wants it.
void head_finish(const Context& context, const Norm& norm, const View& x, const HeadRows& rows,
                 const View& dx, const LossOptions& options);

// The gradient of the matrix alone, of what head_loss has kept (its `keep`, with the batch's targets): the
// logits once more, a segment at a time, and of each chunk the same product that head_loss would have added.
void head_weight_gradient(const Context& context, const Param& weight, const HeadRows& rows,
                          const LossOptions& options);

// For generation and tests: the final norm of x [rows, H], and a segment's columns of its logits [rows, V].
View head_normed(const Context& context, const Norm& norm, const View& x);
void head_segment_logits(const Context& context, const HeadSegment& segment, const View& normed,
                         const View& logits);
// All of them.
void head_logits(const Context& context, const Head& head, const View& x, const View& logits);

}  // namespace lm
