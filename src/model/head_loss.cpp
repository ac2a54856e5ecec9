#include "model/head_loss.h"

#include <ATen/ops/mm.h>

#include <algorithm>
#include <vector>

#include "base/bytes.h"
#include "model/norm.h"

namespace lm {
namespace {

// The rows of a batch that have a target, and these targets, in device memory.
struct TargetRows {
  int64_t count = 0;
  const int32_t* row = nullptr;     // [R]
  const int32_t* target = nullptr;  // [R]
};

const int32_t* to_arena(const Context& context, const std::vector<int32_t>& values) {
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(int32_t));
  std::byte* const memory = context.arena.allocate(bytes);
  copy_bytes(memory, values.data(), bytes, context.stream);
  return reinterpret_cast<const int32_t*>(memory);
}

TargetRows find_targets(const Context& context, const DeviceBatch& batch) {
  std::vector<int32_t> row, target;
  for (int64_t t = 0; t < batch.tokens(); ++t) {
    const int32_t id = batch.host->target[static_cast<size_t>(t)];
    if (id < 0) continue;
    row.push_back(static_cast<int32_t>(t));
    target.push_back(id);
  }
  return {static_cast<int64_t>(row.size()), to_arena(context, row), to_arena(context, target)};
}

// One chunk of rows against the whole vocabulary.
struct Chunk {
  at::Tensor x;  // [R_c, H], normed
  const int32_t* target;
  std::vector<at::Tensor> logits;     // per segment [R_c, columns]
  at::Tensor max, sum, target_logit;  // [R_c] fp32
};

int64_t segment_rows(int64_t vocab, int64_t first) {
  return std::min(kVocabularySegment, vocab - first);
}

Chunk chunk_forward(const Context& context, const Head& head, const at::Tensor& x, const int32_t* target,
                    double* nll_sum) {
  const int64_t rows = x.size(0), vocab = head.weight.weight.size(0);
  Chunk chunk{x,
              target,
              {},
              context.tensor({rows}, DType::kF32),
              context.tensor({rows}, DType::kF32),
              context.tensor({rows}, DType::kF32)};
  for (int64_t first = 0; first < vocab; first += kVocabularySegment) {
    const int64_t columns = segment_rows(vocab, first);
    at::Tensor logits = context.tensor({rows, columns});
    at::mm_out(logits, x, head.weight.weight.narrow(0, first, columns).t());
    context.kernels.softmax_statistics({.logits = logits.data_ptr(),
                                        .target = target,
                                        .max = chunk.max.data_ptr<float>(),
                                        .sum = chunk.sum.data_ptr<float>(),
                                        .target_logit = chunk.target_logit.data_ptr<float>(),
                                        .rows = rows,
                                        .columns = columns,
                                        .stride = columns,
                                        .first_column = first,
                                        .first_segment = first == 0,
                                        .dtype = context.dtype},
                                       context.stream);
    chunk.logits.push_back(std::move(logits));
  }
  context.kernels.softmax_loss({.max = chunk.max.data_ptr<float>(),
                                .sum = chunk.sum.data_ptr<float>(),
                                .target_logit = chunk.target_logit.data_ptr<float>(),
                                .total = nll_sum,
                                .rows = rows},
                               context.stream);
  return chunk;
}

// dx [R_c, H] from the chunk's logits, which become their own gradient.
void chunk_backward(const Context& context, const Head& head, const Chunk& chunk, const at::Tensor& dx,
                    float scale, bool first) {
  const int64_t rows = chunk.x.size(0), vocab = head.weight.weight.size(0);
  const at::Tensor dx_sum = context.tensor(dx.sizes(), DType::kF32);
  at::Tensor part = context.tensor(dx.sizes());
  for (int64_t at_row = 0, s = 0; at_row < vocab; at_row += kVocabularySegment, ++s) {
    const int64_t columns = segment_rows(vocab, at_row);
    const at::Tensor& logits = chunk.logits[static_cast<size_t>(s)];
    context.kernels.softmax_gradient({.logits = logits.data_ptr(),
                                      .target = chunk.target,
                                      .max = chunk.max.data_ptr<float>(),
                                      .sum = chunk.sum.data_ptr<float>(),
                                      .rows = rows,
                                      .columns = columns,
                                      .stride = columns,
                                      .first_column = at_row,
                                      .scale = scale,
                                      .dtype = context.dtype},
                                     context.stream);
    if (head.weight.gradient.defined()) {
      add_weight_gradient(context, head.weight.gradient.narrow(0, at_row, columns), logits, chunk.x, first);
    }
    at::mm_out(part, logits, head.weight.weight.narrow(0, at_row, columns));
    context.kernels.accumulate({.to = dx_sum.data_ptr(),
                                .from = part.data_ptr(),
                                .elements = part.numel(),
                                .to_dtype = DType::kF32,
                                .from_dtype = context.dtype,
                                .overwrite = s == 0},
                               context.stream);
  }
  context.kernels.accumulate({.to = dx.data_ptr(),
                              .from = dx_sum.data_ptr(),
                              .elements = dx.numel(),
                              .to_dtype = context.dtype,
                              .from_dtype = DType::kF32,
                              .overwrite = true},
                             context.stream);
}

void no_targets(const Head& head, const at::Tensor& dx, bool first) {
  if (!dx.defined()) return;
  dx.zero_();
  if (!first) return;
  if (head.norm.gradient.defined()) head.norm.gradient.zero_();
  if (head.weight.gradient.defined()) head.weight.gradient.zero_();
}

}  // namespace

void head_loss(const Context& context, const Head& head, const DeviceBatch& batch, const at::Tensor& x,
               const at::Tensor& dx, double* nll_sum, const LossOptions& options) {
  const ArenaFrame frame(context.arena);
  const int64_t hidden = context.spec.hidden;
  const TargetRows targets = find_targets(context, batch);
  if (targets.count == 0) {
    no_targets(head, dx, options.first);
    return;
  }
  const int64_t rows = targets.count;
  const bool all_rows = rows == x.size(0);
  const at::Tensor picked = all_rows ? x : context.tensor({rows, hidden});
  if (!all_rows) {
    context.kernels.gather_rows({.table = x.data_ptr(),
                                 .index = targets.row,
                                 .out = picked.data_ptr(),
                                 .rows = rows,
                                 .width = hidden,
                                 .dtype = context.dtype},
                                context.stream);
  }
  const at::Tensor normed = context.tensor({rows, hidden});
  const at::Tensor rstd = context.tensor({rows}, DType::kF32);
  norm_forward(context, head.norm, picked, normed, rstd, {1, hidden});
  const at::Tensor dpicked = !dx.defined() ? at::Tensor() : all_rows ? dx : context.tensor({rows, hidden});
  for (int64_t row = 0; row < rows; row += options.row_chunk) {
    const ArenaFrame chunk_frame(context.arena);
    const int64_t count = std::min(options.row_chunk, rows - row);
    const Chunk chunk =
        chunk_forward(context, head, normed.narrow(0, row, count), targets.target + row, nll_sum);
    if (dx.defined()) {
      chunk_backward(context, head, chunk, dpicked.narrow(0, row, count), options.scale,
                     options.first && row == 0);
    }
  }
  if (!dx.defined()) return;
  norm_backward(context, head.norm, dpicked, picked, rstd, {}, dpicked, {1, hidden}, options.first);
  if (!all_rows) {
    context.kernels.scatter_rows({.source = dpicked.data_ptr(),
                                  .index = targets.row,
                                  .out = dx.data_ptr(),
                                  .rows = rows,
                                  .out_rows = dx.size(0),
                                  .width = hidden,
                                  .dtype = context.dtype},
                                 context.stream);
  }
}

void head_logits(const Context& context, const Head& head, const at::Tensor& x, const at::Tensor& logits) {
  const ArenaFrame frame(context.arena);
  const at::Tensor normed = context.tensor(x.sizes());
  norm_forward(context, head.norm, x, normed, {}, {1, context.spec.hidden});
  at::Tensor out = logits;
  at::mm_out(out, normed, head.weight.weight.t());
}

}  // namespace lm
