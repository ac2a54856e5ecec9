#include "model/head_loss.h"

#include <algorithm>
#include <vector>

#include "base/bytes.h"
#include "kernels/counting.h"

namespace lm {
namespace {

// The rows of x [T, H] that have a target: x itself when all have. In training they lie where dx_sum does,
// before it is begun or after it has been read.
View pick(const Context& context, const HeadRows& rows, const View& x) {
  const TargetRows& targets = rows.targets;
  if (targets.count == x.rows) return x;
  const View picked = rows.dx_sum.defined()
                          ? view_of(rows.dx_sum.data, context.dtype, targets.count, x.columns)
                          : context.tensor(targets.count, x.columns);
  context.kernels.gather_rows({.table = x.data,
                               .index = targets.row,
                               .out = picked.data,
                               .rows = targets.count,
                               .width = x.columns,
                               .dtype = context.dtype},
                              context.stream);
  return picked;
}

// Back to where pick took them from; other rows become zero.
void put_back(const Context& context, const TargetRows& targets, const View& dpicked, const View& dx) {
  if (targets.count == dx.rows) return;
  context.kernels.scatter_rows({.source = dpicked.data,
                                .index = targets.row,
                                .out = dx.data,
                                .rows = targets.count,
                                .out_rows = dx.rows,
                                .width = dx.columns,
                                .dtype = context.dtype},
                               context.stream);
}

// The products become what the model calls its logits.
void cap(const Context& context, const View& logits) {
  const HeadSpec& head = context.spec.head;
  if (head.logit_scale == 1 && head.logit_cap == 0) return;
  context.kernels.cap_logits({.logits = logits.data,
                              .rows = logits.rows,
                              .columns = logits.columns,
                              .stride = logits.stride,
                              .scale = static_cast<float>(head.logit_scale),
                              .cap = static_cast<float>(head.logit_cap),
                              .dtype = logits.dtype},
                             context.stream);
}

// s x Aᵀ [R, r]; undefined without an adapter.
View reduced_of(const Context& context, const HeadAdapter& adapter, const View& x) {
  if (!adapter.defined()) return {};
  const View out = context.tensor(x.rows, adapter.a.weight.rows);
  context.kernels.gemm({.a = x, .b = adapter.a.weight, .out = out, .transpose_b = true}, context.stream);
  context.kernels.scale({.x = out, .out = out, .factor = adapter.scale}, context.stream);
  return out;
}

// logits = x Wᵀ (+ reduced Bᵀ), scaled and capped
void multiply(const Context& context, const View& x, const HeadSegment& segment, const View& reduced,
              const View& logits) {
  context.kernels.gemm({.a = x, .b = segment.weight.weight, .out = logits, .transpose_b = true},
                       context.stream);
  if (reduced.defined())
    context.kernels.gemm(
        {.a = reduced, .b = segment.adapter.b.weight, .out = logits, .addend = logits, .transpose_b = true},
        context.stream);
  cap(context, logits);
}

int64_t segment_rows(int64_t vocab, int64_t first) {
  return std::min(kVocabularySegment, vocab - first);
}

HeadSegment segment_of(const Head& head, int64_t first) {
  const int64_t rows = segment_rows(head.weight.weight.rows, first);
  const auto part = [&](const Param& whole) {
    const auto some = [&](const View& all) { return all.defined() ? all.row_range(first, rows) : View(); };
    return Param{some(whole.weight), some(whole.gradient)};
  };
  return {.weight = part(head.weight),
          .first_row = first,
          .tokens = head.tokens,
          .adapter = {head.adapter.a, part(head.adapter.b), head.adapter.scale}};
}

// Some rows against the vocabulary. Rows of x behind the first `rows` are zero, and so are their logits and
// what comes of these.
struct Chunk {
  View x;        // [R_c, H], normed
  int64_t rows;  // that are of the batch
  const int32_t* target;
  const float* weight;                        // of the targets; null: 1
  View max, sum, target_logit, nll, correct;  // [R_c] fp32
  View dx_sum;                                // [R_c, H] fp32; undefined: dx is not wanted
  View part = {};      // [R_c, H], scratch beside dx_sum; undefined where products add to fp32 themselves
  View dreduced = {};  // [R_c, r] fp32; undefined: not wanted, as HeadRows has it
  View reduced = {};   // s x Aᵀ [R_c, r] of an adapter
};

// logits [R_c, S] of a segment; they join the chunk's statistics.
View segment_forward(const Context& context, const HeadSegment& segment, const Chunk& chunk) {
  const int64_t columns = segment.weight.weight.rows;
  View logits = context.tensor(chunk.x.rows, columns);
  multiply(context, chunk.x, segment, chunk.reduced, logits);
  context.kernels.softmax_statistics({.logits = logits.data,
                                      .target = chunk.target,
                                      .max = chunk.max.floats(),
                                      .sum = chunk.sum.floats(),
                                      .target_logit = chunk.target_logit.floats(),
                                      .correct = chunk.correct.floats(),
                                      .rows = chunk.rows,
                                      .columns = columns,
                                      .stride = columns,
                                      .first_column = segment.first_row,
                                      .first_segment = segment.first_row == 0,
                                      .dtype = context.dtype},
                                     context.stream);
  return logits;
}

void add_loss(const Context& context, const Chunk& chunk, LossSums* sums) {
  context.kernels.softmax_loss({.max = chunk.max.floats(),
                                .sum = chunk.sum.floats(),
                                .target_logit = chunk.target_logit.floats(),
                                .weight = chunk.weight,
                                .correct = chunk.correct.floats(),
                                .nll = chunk.nll.floats(),
                                .total = &sums->nll,
                                .correct_total = &sums->correct,
                                .rows = chunk.rows},
                               context.stream);
}

// Whether a product of the model's type adds to fp32 itself: it is then rounded nowhere in between, and no
// pass reads it again. (LibTorch has no such products on a CPU.)
bool sums_products(const Context& context) {
  return context.device == DeviceType::kCuda;
}

// to += a b, in fp32; or to = a b. `part`: where the product lies that is added then.
void add_product(const Context& context, const View& a, const View& b, const View& part, const View& to,
                 bool overwrite) {
  if (sums_products(context))
    return context.kernels.gemm({.a = a, .b = b, .out = to, .addend = overwrite ? View() : to},
                                context.stream);
  context.kernels.gemm({.a = a, .b = b, .out = part}, context.stream);
  accumulate(context, to, part, overwrite);
}
View part_like(const Context& context, const View& x) {
  return sums_products(context) ? View() : context.like(x);
}

// What the gradient of a segment's logits gives an adapter: B's rows, and their part of dreduced.
void adapter_segment_backward(const Context& context, const HeadSegment& segment, const Chunk& chunk,
                              const View& dlogits, bool first) {
  const Param& b = segment.adapter.b;
  add_weight_gradient(context, b.gradient, dlogits, chunk.reduced, first);
  const ArenaFrame frame(context.arena);
  add_product(context, dlogits, b.weight, part_like(context, chunk.reduced), chunk.dreduced,
              segment.first_row == 0);
}

// After the last segment: A's gradient, and its part of dx_sum.
void adapter_finish(const Context& context, const HeadAdapter& adapter, const Chunk& chunk, bool first) {
  const ArenaFrame frame(context.arena);
  const View d = context.tensor(chunk.x.rows, adapter.a.weight.rows);
  accumulate(context, d, chunk.dreduced, true);
  context.kernels.scale({.x = d, .out = d, .factor = adapter.scale}, context.stream);
  add_weight_gradient(context, adapter.a.gradient, d, chunk.x, first);
  if (!chunk.dx_sum.defined()) return;
  add_product(context, d, adapter.a.weight, part_like(context, chunk.x), chunk.dx_sum, false);
}

// The logits become their own gradient; what follows from it is added.
void segment_backward(const Context& context, const HeadSegment& segment, const Chunk& chunk,
                      const View& logits, float scale, bool first) {
  const int64_t columns = segment.weight.weight.rows;
  context.kernels.softmax_gradient({.logits = logits.data,
                                    .target = chunk.target,
                                    .max = chunk.max.floats(),
                                    .sum = chunk.sum.floats(),
                                    .rows = chunk.rows,
                                    .columns = columns,
                                    .stride = columns,
                                    .first_column = segment.first_row,
                                    .scale = scale,
                                    .weight = chunk.weight,
                                    .logit_scale = static_cast<float>(context.spec.head.logit_scale),
                                    .logit_cap = static_cast<float>(context.spec.head.logit_cap),
                                    .dtype = context.dtype},
                                   context.stream);
  if (segment.weight.gradient.defined())
    add_weight_gradient(context, segment.weight.gradient, logits, chunk.x, first);
  add_token_gradients(context, segment.tokens, logits, segment.first_row, chunk.x, first);
  if (chunk.dreduced.defined()) adapter_segment_backward(context, segment, chunk, logits, first);
  if (!chunk.dx_sum.defined()) return;
  add_product(context, logits, segment.weight.weight, chunk.part, chunk.dx_sum, segment.first_row == 0);
}

// One chunk of rows against the whole vocabulary, both phases: the logits are computed once.
void fused_chunk(const Context& context, const Head& head, Chunk chunk, LossSums* sums, float scale,
                 bool first) {
  chunk.reduced = reduced_of(context, head.adapter, chunk.x);
  std::vector<View> logits;  // per segment
  for (int64_t row = 0; row < head.weight.weight.rows; row += kVocabularySegment)
    logits.push_back(segment_forward(context, segment_of(head, row), chunk));
  add_loss(context, chunk, sums);
  const bool matrix = head.weight.gradient.defined() || head.tokens.rows.gradient.defined();
  if (!chunk.dx_sum.defined() && !matrix && !chunk.dreduced.defined()) return;
  if (chunk.dx_sum.defined()) chunk.part = part_like(context, chunk.x);
  for (size_t s = 0; s < logits.size(); ++s) {
    const HeadSegment segment = segment_of(head, static_cast<int64_t>(s) * kVocabularySegment);
    segment_backward(context, segment, chunk, logits[s], scale, first);
  }
  if (chunk.dreduced.defined()) adapter_finish(context, head.adapter, chunk, first);
}

void zero_gradient(const Context& context, const Param& param) {
  if (param.gradient.defined()) context.kernels.zero(param.gradient, context.stream);
}
void zero_gradient(const Context& context, const Head& head) {
  for (const Param* one : {&head.weight, &head.tokens.rows, &head.adapter.a, &head.adapter.b})
    zero_gradient(context, *one);
}
void zero_gradient(const Context& context, const Norm& norm) {
  zero_gradient(context, norm.weight);
  zero_gradient(context, norm.bias);
}

// The final norm of the rows with targets, into the first rows of `normed`; zeros behind.
void norm_targets(const Context& context, const Norm& norm, const TargetRows& targets, const View& picked,
                  const View& normed, const View& rstd) {
  norm_forward(context, norm, picked, normed.row_range(0, targets.count), rstd);
  zero_surplus(context, normed, targets.count);
}

// Calls work(chunk, first row) for the rows, in order, each within an arena frame. A dry run carries out
// the first chunk, one for all others that are as long, and what is left.
template <class Work>
void for_chunks(const Context& context, const HeadRows& rows, const LossOptions& options, const Work& work) {
  const int64_t row_chunk = options.row_chunk;
  for (int64_t row = 0, alike = 1; row < rows.targets.count; row += alike * row_chunk) {
    const bool first = row == 0 || context.counts == nullptr;
    alike = first ? 1 : std::max<int64_t>((rows.targets.count - row) / row_chunk, 1);
    const CountedTimes counted(context.counts, alike);
    const ArenaFrame frame(context.arena);
    const int64_t used = std::min(row_chunk, rows.targets.count - row);
    const int64_t count = std::min(row_chunk, context.rounded(rows.targets.count) - row);
    const auto some = [&](const View& all, int64_t of) {
      return all.defined() ? all.row_range(row, of) : View();
    };
    work(Chunk{.x = some(rows.normed, count),
               .rows = used,
               .target = rows.targets.target + row,
               .weight = rows.targets.weight == nullptr ? nullptr : rows.targets.weight + row,
               .max = some(rows.max, used),
               .sum = some(rows.sum, used),
               .target_logit = some(rows.target_logit, used),
               .nll = some(rows.nll, used),
               .correct = some(rows.correct, used),
               .dx_sum = some(rows.dx_sum, count),
               .dreduced = some(rows.dreduced, count)},
         row);
  }
}

// With memory for what backward adds up of an adapter.
HeadRows with_adapter(const Context& context, const Head& head, HeadRows rows) {
  if (head.adapter.a.gradient.defined())
    rows.dreduced = context.tensor(rows.normed.rows, head.adapter.a.weight.rows, DType::kF32);
  return rows;
}

}  // namespace

HeadRows head_begin(const Context& context, const Norm& norm, const DeviceBatch& batch, const View& x,
                    const View& dx, const LossOptions& options) {
  const HeadRows* const keep = options.keep;
  HeadRows rows = keep != nullptr ? *keep : HeadRows();
  rows.targets = batch.targets;
  const int64_t count = rows.targets.count, hidden = context.spec.hidden;
  const int64_t rounded = context.rounded(count);
  if (keep == nullptr) rows.normed = dx.defined() ? dx : context.tensor(rounded, hidden);
  rows.normed = rows.normed.row_range(0, rounded);
  for (View* column : {&rows.rstd, &rows.max, &rows.sum, &rows.target_logit, &rows.nll, &rows.correct}) {
    if (!column->defined()) *column = context.tensor(count, 1, DType::kF32);
  }
  if (dx.defined() || options.norm_gradient) rows.dx_sum = context.tensor(rounded, hidden, DType::kF32);
  if (count == 0) return rows;
  const ArenaFrame frame(context.arena);
  norm_targets(context, norm, rows.targets, pick(context, rows, x), rows.normed, rows.rstd);
  return rows;
}

void head_segment_forward(const Context& context, const HeadSegment& segment, const HeadRows& rows,
                          LossSums* sums, const LossOptions& options) {
  const bool last = segment.first_row + segment.weight.weight.rows == context.spec.vocab;
  for_chunks(context, rows, options, [&](Chunk chunk, int64_t) {
    chunk.reduced = reduced_of(context, segment.adapter, chunk.x);
    segment_forward(context, segment, chunk);
    if (last) add_loss(context, chunk, sums);
  });
}

void head_segment_backward(const Context& context, const HeadSegment& segment, const HeadRows& rows,
                           const LossOptions& options) {
  if (rows.targets.count == 0 && options.first) {
    for (const Param* one : {&segment.weight, &segment.tokens.rows, &segment.adapter.b})
      zero_gradient(context, *one);
  }
  for_chunks(context, rows, options, [&](Chunk chunk, int64_t row) {
    // Once more; of the statistics there is nothing left to learn.
    chunk.reduced = reduced_of(context, segment.adapter, chunk.x);
    View logits = context.tensor(chunk.x.rows, segment.weight.weight.rows);
    multiply(context, chunk.x, segment, chunk.reduced, logits);
    if (chunk.dx_sum.defined()) chunk.part = part_like(context, chunk.x);
    segment_backward(context, segment, chunk, logits, options.scale, options.first && row == 0);
  });
}

void head_matrix_forward(const Context& context, const Head& head, const HeadRows& rows, LossSums* sums,
                         const LossOptions& options) {
  for (int64_t row = 0; row < head.weight.weight.rows; row += kVocabularySegment)
    head_segment_forward(context, segment_of(head, row), rows, sums, options);
}

void head_matrix_backward(const Context& context, const Head& head, const HeadRows& all,
                          const LossOptions& options) {
  const ArenaFrame frame(context.arena);
  const HeadRows rows = with_adapter(context, head, all);
  for (int64_t row = 0; row < head.weight.weight.rows; row += kVocabularySegment)
    head_segment_backward(context, segment_of(head, row), rows, options);
  if (!rows.dreduced.defined()) return;
  if (rows.targets.count == 0 && options.first) zero_gradient(context, head.adapter.a);
  for_chunks(context, rows, options, [&](const Chunk& chunk, int64_t row) {
    adapter_finish(context, head.adapter, chunk, options.first && row == 0);
  });
}

void head_finish(const Context& context, const Norm& norm, const View& x, const HeadRows& rows,
                 const View& dx, const LossOptions& options) {
  if (!rows.dx_sum.defined()) return;
  const ArenaFrame frame(context.arena);
  const int64_t count = rows.targets.count, hidden = context.spec.hidden;
  if (count == 0) {
    if (dx.defined()) context.kernels.zero(dx, context.stream);
    if (options.first) zero_gradient(context, norm);
    return;
  }
  const View dpicked = dx.defined() && count == x.rows ? dx : context.tensor(count, hidden);
  accumulate(context, dpicked, rows.dx_sum.row_range(0, dpicked.rows), true);
  const View picked = pick(context, rows, x);
  norm_backward(context, norm, {.dy = dpicked, .x = picked, .rstd = rows.rstd, .dx = dpicked}, options.first);
  if (dx.defined()) put_back(context, rows.targets, dpicked, dx);
}

void head_loss(const Context& context, const Head& head, const DeviceBatch& batch, const HeadInput& input,
               LossSums* sums, const LossOptions& options) {
  const auto& [x, dx] = input;
  const ArenaFrame frame(context.arena);
  const HeadRows rows = with_adapter(context, head, head_begin(context, head.norm, batch, x, dx, options));
  if (rows.targets.count == 0 && options.first) zero_gradient(context, head);
  for_chunks(context, rows, options, [&](const Chunk& chunk, int64_t row) {
    fused_chunk(context, head, chunk, sums, options.scale, options.first && row == 0);
  });
  head_finish(context, head.norm, x, rows, dx, options);
}

View head_normed(const Context& context, const Norm& norm, const View& x) {
  const View normed = context.like(x);
  norm_forward(context, norm, x, normed, {});
  return normed;
}

void head_segment_logits(const Context& context, const HeadSegment& segment, const View& normed,
                         const View& logits) {
  const View& weight = segment.weight.weight;
  const View columns = logits.column_range(segment.first_row, weight.rows);
  const ArenaFrame frame(context.arena);
  const View reduced = reduced_of(context, segment.adapter, normed);
  if (normed.rows > 1 || reduced.defined() || context.kernels.multiply_row == nullptr)
    return multiply(context, normed, segment, reduced, columns);
  context.kernels.multiply_row({.x = normed.data,
                                .weight = weight.data,
                                .out = columns.data,
                                .rows = weight.rows,
                                .columns = weight.columns,
                                .stride = weight.stride,
                                .dtype = context.dtype},
                               context.stream);
  cap(context, columns);
}

void head_logits(const Context& context, const Head& head, const View& x, const View& logits) {
  const ArenaFrame frame(context.arena);
  const View normed = head_normed(context, head.norm, x);
  for (int64_t row = 0; row < head.weight.weight.rows; row += kVocabularySegment)
    head_segment_logits(context, segment_of(head, row), normed, logits);
}

}  // namespace lm
