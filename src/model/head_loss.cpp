#include "model/head_loss.h"

#include <ATen/ops/mm.h>

#include <algorithm>
#include <vector>

#include "base/bytes.h"
#include "model/norm.h"

namespace lm {
namespace {

// The rows of x [T, H] that have a target: x itself when all have.
at::Tensor pick(const Context& context, const TargetRows& targets, const at::Tensor& x) {
  if (targets.count == x.size(0)) return x;
  const at::Tensor picked = context.tensor({targets.count, x.size(1)});
  context.kernels.gather_rows({.table = x.data_ptr(),
                               .index = targets.row,
                               .out = picked.data_ptr(),
                               .rows = targets.count,
                               .width = x.size(1),
                               .dtype = context.dtype},
                              context.stream);
  return picked;
}

// Back to where pick took them from; other rows become zero.
void put_back(const Context& context, const TargetRows& targets, const at::Tensor& dpicked,
              const at::Tensor& dx) {
  if (targets.count == dx.size(0)) return;
  context.kernels.scatter_rows({.source = dpicked.data_ptr(),
                                .index = targets.row,
                                .out = dx.data_ptr(),
                                .rows = targets.count,
                                .out_rows = dx.size(0),
                                .width = dx.size(1),
                                .dtype = context.dtype},
                               context.stream);
}

int64_t segment_rows(int64_t vocab, int64_t first) {
  return std::min(kVocabularySegment, vocab - first);
}

HeadSegment segment_of(const Param& weight, int64_t first) {
  const int64_t rows = segment_rows(weight.weight.size(0), first);
  return {.weight = {weight.weight.narrow(0, first, rows),
                     weight.gradient.defined() ? weight.gradient.narrow(0, first, rows) : at::Tensor()},
          .first_row = first};
}

// Some rows against the vocabulary. Rows of x behind the first `rows` are zero, and so are their logits and
// what comes of these.
struct Chunk {
  at::Tensor x;  // [R_c, H], normed
  int64_t rows;  // that are of the batch
  const int32_t* target;
  at::Tensor max, sum, target_logit;  // [R_c] fp32
  at::Tensor dx_sum;                  // [R_c, H] fp32
};

// logits [R_c, S] of a segment; they join the chunk's statistics.
at::Tensor segment_forward(const Context& context, const HeadSegment& segment, const Chunk& chunk) {
  const int64_t columns = segment.weight.weight.size(0);
  at::Tensor logits = context.tensor({chunk.x.size(0), columns});
  at::mm_out(logits, chunk.x, segment.weight.weight.t());
  context.kernels.softmax_statistics({.logits = logits.data_ptr(),
                                      .target = chunk.target,
                                      .max = chunk.max.data_ptr<float>(),
                                      .sum = chunk.sum.data_ptr<float>(),
                                      .target_logit = chunk.target_logit.data_ptr<float>(),
                                      .rows = chunk.rows,
                                      .columns = columns,
                                      .stride = columns,
                                      .first_column = segment.first_row,
                                      .first_segment = segment.first_row == 0,
                                      .dtype = context.dtype},
                                     context.stream);
  return logits;
}

void add_loss(const Context& context, const Chunk& chunk, double* nll_sum) {
  context.kernels.softmax_loss({.max = chunk.max.data_ptr<float>(),
                                .sum = chunk.sum.data_ptr<float>(),
                                .target_logit = chunk.target_logit.data_ptr<float>(),
                                .total = nll_sum,
                                .rows = chunk.rows},
                               context.stream);
}

// The logits become their own gradient; what follows from it is added. `part` [R_c, H] is scratch.
void segment_backward(const Context& context, const HeadSegment& segment, const Chunk& chunk,
                      const at::Tensor& logits, at::Tensor part, float scale, bool first) {
  const int64_t columns = segment.weight.weight.size(0);
  context.kernels.softmax_gradient({.logits = logits.data_ptr(),
                                    .target = chunk.target,
                                    .max = chunk.max.data_ptr<float>(),
                                    .sum = chunk.sum.data_ptr<float>(),
                                    .rows = chunk.rows,
                                    .columns = columns,
                                    .stride = columns,
                                    .first_column = segment.first_row,
                                    .scale = scale,
                                    .dtype = context.dtype},
                                   context.stream);
  if (segment.weight.gradient.defined())
    add_weight_gradient(context, segment.weight.gradient, logits, chunk.x, first);
  at::mm_out(part, logits, segment.weight.weight);
  context.kernels.accumulate({.to = chunk.dx_sum.data_ptr(),
                              .from = part.data_ptr(),
                              .elements = part.numel(),
                              .to_dtype = DType::kF32,
                              .from_dtype = context.dtype,
                              .overwrite = segment.first_row == 0},
                             context.stream);
}

// dx = dx_sum's first rows, rounded.
void round_sum(const Context& context, const at::Tensor& dx_sum, const at::Tensor& dx) {
  context.kernels.accumulate({.to = dx.data_ptr(),
                              .from = dx_sum.data_ptr(),
                              .elements = dx.numel(),
                              .to_dtype = context.dtype,
                              .from_dtype = DType::kF32,
                              .overwrite = true},
                             context.stream);
}

// One chunk of rows against the whole vocabulary; dx [R_c, H] undefined: the loss alone.
void whole_chunk(const Context& context, const Head& head, Chunk chunk, const at::Tensor& dx, double* nll_sum,
                 float scale, bool first) {
  const int64_t vocab = head.weight.weight.size(0);
  for (at::Tensor* statistic : {&chunk.max, &chunk.sum, &chunk.target_logit})
    *statistic = context.tensor({chunk.rows}, DType::kF32);
  std::vector<at::Tensor> logits;  // per segment
  for (int64_t row = 0; row < vocab; row += kVocabularySegment)
    logits.push_back(segment_forward(context, segment_of(head.weight, row), chunk));
  add_loss(context, chunk, nll_sum);
  if (!dx.defined()) return;
  chunk.dx_sum = context.tensor(dx.sizes(), DType::kF32);
  const at::Tensor part = context.tensor(dx.sizes());
  for (size_t s = 0; s < logits.size(); ++s) {
    const HeadSegment segment = segment_of(head.weight, static_cast<int64_t>(s) * kVocabularySegment);
    segment_backward(context, segment, chunk, logits[s], part, scale, first);
  }
  round_sum(context, chunk.dx_sum, dx);
}

void zero_gradient(const Param& param) {
  if (param.gradient.defined()) at::Tensor(param.gradient).zero_();
}

// The final norm of the rows with targets, into the first rows of `normed`; zeros behind.
void norm_targets(const Context& context, const Param& norm, const TargetRows& targets,
                  const at::Tensor& picked, const at::Tensor& normed, const at::Tensor& rstd) {
  norm_forward(context, norm, picked, normed.narrow(0, 0, targets.count), rstd, {1, normed.size(1)});
  zero_surplus(normed, targets.count);
}

// Calls work(chunk, first row) for the rows, in order, each within an arena frame.
template <class Work>
void for_chunks(const Context& context, const HeadRows& rows, int64_t row_chunk, const Work& work) {
  for (int64_t row = 0; row < rows.targets.count; row += row_chunk) {
    const ArenaFrame frame(context.arena);
    const int64_t used = std::min(row_chunk, rows.targets.count - row);
    const int64_t count = std::min(row_chunk, context.rounded(rows.targets.count) - row);
    const auto some = [&](const at::Tensor& all, int64_t of) {
      return all.defined() ? all.narrow(0, row, of) : at::Tensor();
    };
    work(Chunk{some(rows.normed, count), used, rows.targets.target + row, some(rows.max, used),
               some(rows.sum, used), some(rows.target_logit, used), some(rows.dx_sum, count)},
         row);
  }
}

}  // namespace

void head_loss(const Context& context, const Head& head, const DeviceBatch& batch, const at::Tensor& x,
               const at::Tensor& dx, double* nll_sum, const LossOptions& options) {
  const ArenaFrame frame(context.arena);
  const int64_t hidden = context.spec.hidden;
  HeadRows rows;
  rows.targets = batch.targets;
  const int64_t count = rows.targets.count;
  if (count == 0) {
    if (dx.defined()) at::Tensor(dx).zero_();
    if (dx.defined() && options.first) zero_gradient(head.norm), zero_gradient(head.weight);
    return;
  }
  const at::Tensor picked = pick(context, rows.targets, x);
  rows.normed = context.tensor({context.rounded(count), hidden});
  rows.rstd = context.tensor({count}, DType::kF32);
  norm_targets(context, head.norm, rows.targets, picked, rows.normed, rows.rstd);
  at::Tensor dpicked = !dx.defined()        ? at::Tensor()
                       : count == x.size(0) ? dx
                                            : context.tensor(rows.normed.sizes());
  for_chunks(context, rows, options.row_chunk, [&](const Chunk& chunk, int64_t row) {
    const at::Tensor dchunk = dx.defined() ? dpicked.narrow(0, row, chunk.x.size(0)) : at::Tensor();
    whole_chunk(context, head, chunk, dchunk, nll_sum, options.scale, options.first && row == 0);
  });
  if (!dx.defined()) return;
  dpicked = dpicked.narrow(0, 0, count);
  norm_backward(context, head.norm, dpicked, picked, rows.rstd, {}, dpicked, {1, hidden}, options.first);
  put_back(context, rows.targets, dpicked, dx);
}

HeadRows head_begin(const Context& context, const Param& norm, const DeviceBatch& batch, const at::Tensor& x,
                    const at::Tensor& dx) {
  HeadRows rows;
  rows.targets = batch.targets;
  const int64_t count = rows.targets.count, hidden = context.spec.hidden;
  const int64_t rounded = context.rounded(count);
  rows.normed = dx.defined() ? dx.narrow(0, 0, rounded) : context.tensor({rounded, hidden});
  for (at::Tensor* statistic : {&rows.rstd, &rows.max, &rows.sum, &rows.target_logit})
    *statistic = context.tensor({count}, DType::kF32);
  if (dx.defined()) rows.dx_sum = context.tensor({rounded, hidden}, DType::kF32);
  if (count == 0) return rows;
  const ArenaFrame frame(context.arena);
  norm_targets(context, norm, rows.targets, pick(context, rows.targets, x), rows.normed, rows.rstd);
  return rows;
}

void head_segment_forward(const Context& context, const HeadSegment& segment, const HeadRows& rows,
                          double* nll_sum, const LossOptions& options) {
  const bool last = segment.first_row + segment.weight.weight.size(0) == context.spec.vocab;
  for_chunks(context, rows, options.row_chunk, [&](const Chunk& chunk, int64_t) {
    segment_forward(context, segment, chunk);
    if (last) add_loss(context, chunk, nll_sum);
  });
}

void head_segment_backward(const Context& context, const HeadSegment& segment, const HeadRows& rows,
                           const LossOptions& options) {
  if (rows.targets.count == 0 && options.first) zero_gradient(segment.weight);
  for_chunks(context, rows, options.row_chunk, [&](const Chunk& chunk, int64_t row) {
    // Once more; of the statistics there is nothing left to learn.
    at::Tensor logits = context.tensor({chunk.x.size(0), segment.weight.weight.size(0)});
    at::mm_out(logits, chunk.x, segment.weight.weight.t());
    const at::Tensor part = context.tensor(chunk.x.sizes());
    segment_backward(context, segment, chunk, logits, part, options.scale, options.first && row == 0);
  });
}

void head_finish(const Context& context, const Param& norm, const at::Tensor& x, const HeadRows& rows,
                 const at::Tensor& dx, const LossOptions& options) {
  const ArenaFrame frame(context.arena);
  const int64_t count = rows.targets.count, hidden = context.spec.hidden;
  if (count == 0) {
    at::Tensor(dx).zero_();
    if (options.first) zero_gradient(norm);
    return;
  }
  const at::Tensor picked = pick(context, rows.targets, x);
  const at::Tensor dpicked = count == x.size(0) ? dx : context.tensor({count, hidden});
  round_sum(context, rows.dx_sum, dpicked);
  norm_backward(context, norm, dpicked, picked, rows.rstd, {}, dpicked, {1, hidden}, options.first);
  put_back(context, rows.targets, dpicked, dx);
}

at::Tensor head_normed(const Context& context, const Param& norm, const at::Tensor& x) {
  const at::Tensor normed = context.tensor(x.sizes());
  norm_forward(context, norm, x, normed, {}, {1, context.spec.hidden});
  return normed;
}

void head_segment_logits(const HeadSegment& segment, const at::Tensor& normed, const at::Tensor& logits) {
  at::Tensor columns = logits.narrow(1, segment.first_row, segment.weight.weight.size(0));
  at::mm_out(columns, normed, segment.weight.weight.t());
}

void head_logits(const Context& context, const Head& head, const at::Tensor& x, const at::Tensor& logits) {
  const ArenaFrame frame(context.arena);
  const at::Tensor normed = head_normed(context, head.norm, x);
  for (int64_t row = 0; row < head.weight.weight.size(0); row += kVocabularySegment)
    head_segment_logits(segment_of(head.weight, row), normed, logits);
}

}  // namespace lm
