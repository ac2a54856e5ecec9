// The final norm, the vocabulary projection and the cross-entropy, forward and backward in chunks of rows:
// logits of the whole batch never exist. Rows without a target are dropped before the norm; each of the
// others has a weight in the loss (TargetRows) and may give its nll by itself. The vocabulary is walked in
// segments of 8192 rows in order: (max, sum) combine per segment, dX is added per segment in fp32, so that
// cutting the matrix never changes a bit. A model's factor and cap of its logits (HeadSpec) follow each
// segment's product, wherever that is made.
//
// A pass of the head has two phases: forward gives each row's nll; backward takes each row's weight in the
// loss. The steps are taken singly: begin, forward of each segment, backward of each segment, finish; the
// logits are computed twice, in four GEMMs. Between the phases an objective may make weights of the nll. If
// the weights are known beforehand and the matrix is there as a whole, head_loss fuses the phases for one
// chunk of rows after another, in three GEMMs and with the same bits. The gradient of a whole matrix may also
// be made later than the rest (LossOptions::keep, then head_matrix_backward).
#pragma once

#include "model/norm.h"
#include "model/token_rows.h"
#include "spec/block_layout.h"

namespace lm {

// LoRA on an untied head: logits = x Wᵀ + s (x Aᵀ) Bᵀ. Undefined: there is none.
struct HeadAdapter {
  Param a, b;  // [r, H], [V, r]
  float scale = 1;
  bool defined() const { return a.weight.defined(); }
};

struct Head {
  Norm norm;              // [H]
  Param weight;           // [V, H]; the embedding's matrix when tied
  TokenRows tokens = {};  // of that matrix, which has them already
  HeadAdapter adapter = {};
};

// Rows [first_row, first_row + weight's rows) of the matrix.
struct HeadSegment {
  Param weight;  // [S, H]
  int64_t first_row = 0;
  TokenRows tokens = {};     // of the whole matrix
  HeadAdapter adapter = {};  // of a whole head's segment: with these rows of B
};

struct LossOptions {
  int64_t row_chunk = 512;     // rows of logits at once; numerics: fixed by the plan
  float scale = 1;             // 1 / sum of the target rows' weights in the whole optimizer step
  bool norm_gradient = false;  // that of the final norm is wanted, even where that of x is not
  bool first = false;          // the step's first micro-batch: gradients are overwritten
  // Memory for what a later head_matrix_backward of the matrix alone reads: normed, max, sum and nll. Null:
  // there is none.
  const struct HeadRows* keep = nullptr;
};

// What a pass of the head adds up over rows with a target; in device memory.
struct LossSums {
  double nll = 0;      // weight * nll
  double correct = 0;  // rows whose target is the argmax of their logits, whatever their weight
};

// What a step's check looks at, in device memory.
struct StepSums {
  LossSums loss;
  RouterFigures routers;  // on a GPU, of a model with experts
};

// What a step copies to the host beside norms of granules: its sums, and decisions (train/device_decision.h).
inline constexpr int64_t kStepResultBytes =
    static_cast<int64_t>(sizeof(StepSums)) + kDecisionsInFlight * static_cast<int64_t>(sizeof(StepDecision));

// The rows of a micro-batch between the steps, in arena order.
struct HeadRows {
  TargetRows targets;
  View normed;  // [R', H]: R rounded up; in training it waits in dx until the end
  View rstd;    // [R] fp32
  // [R] fp32; nll and correct (1 or 0) are complete after the last segment's forward.
  View max, sum, target_logit, nll, correct;
  View dx_sum;         // [R', H] fp32; undefined in evaluation, and where nobody wants the norm's backward
  View dreduced = {};  // [R', r] fp32, of an adapter whose gradient is under way: that of s x Aᵀ
};
// `dx` [T, H] undefined: evaluation, or its gradient is not wanted.
HeadRows head_begin(const Context& context, const Norm& norm, const DeviceBatch& batch, const View& x,
                    const View& dx, const LossOptions& options);
// The last segment completes the softmax, and adds to *sums.
void head_segment_forward(const Context& context, const HeadSegment& segment, const HeadRows& rows,
                          LossSums* sums, const LossOptions& options);
void head_segment_backward(const Context& context, const HeadSegment& segment, const HeadRows& rows,
                           const LossOptions& options);
// `x` is head_begin's, and dx becomes its gradient; undefined: nobody wants it.
void head_finish(const Context& context, const Norm& norm, const View& x, const HeadRows& rows,
                 const View& dx, const LossOptions& options);

// All segments of a whole matrix; the head's norm is unused. If the rows have no dx_sum, backward makes the
// gradient of the matrix alone.
void head_matrix_forward(const Context& context, const Head& head, const HeadRows& rows, LossSums* sums,
                         const LossOptions& options);
void head_matrix_backward(const Context& context, const Head& head, const HeadRows& rows,
                          const LossOptions& options);

// All of it with the weights of the batch, fused: adds to *sums, `dx` [T, H] becomes the
// gradient of x [T, H], and the head's gradients are added.
struct HeadInput {
  View x, dx;
};
void head_loss(const Context& context, const Head& head, const DeviceBatch& batch, const HeadInput& input,
               LossSums* sums, const LossOptions& options);

// For generation and tests: the final norm of x [rows, H], and a segment's columns of its logits [rows, V].
View head_normed(const Context& context, const Norm& norm, const View& x);
void head_segment_logits(const Context& context, const HeadSegment& segment, const View& normed,
                         const View& logits);
// All of them.
void head_logits(const Context& context, const Head& head, const View& x, const View& logits);

}  // namespace lm
