#include "model/score_head.h"

namespace lm {
namespace {

View converted(const Context& context, const View& from, DType type) {
  if (from.dtype == type) return from;
  const View out = context.tensor(from.rows, from.columns, type);
  accumulate(context, out, from, true);
  return out;
}

// Of all rows, those behind the texts' included: they are zero.
View all_scores(const Context& context, const Param& weight, const View& normed) {
  const View products = context.tensor(normed.rows, weight.weight.rows, weight.weight.dtype);
  context.kernels.gemm({.a = normed, .b = weight.weight, .out = products, .transpose_b = true},
                       context.stream);
  return converted(context, products, DType::kF32);
}

// `dscores` [R', labels] fp32, `normed` of the weight's type.
void backward(const Context& context, const Param& weight, const View& normed, const View& dscores,
              const HeadRows& rows, bool first) {
  const View dproducts = converted(context, dscores, weight.weight.dtype);
  if (weight.gradient.defined()) add_weight_gradient(context, weight.gradient, dproducts, normed, first);
  if (!rows.dx_sum.defined()) return;
  const View part = context.like(normed);
  context.kernels.gemm({.a = dproducts, .b = weight.weight, .out = part}, context.stream);
  accumulate(context, rows.dx_sum, part, true);
}

}  // namespace

View score_rows(const Context& context, const Param& weight, const HeadRows& rows) {
  const View normed = converted(context, rows.normed, weight.weight.dtype);
  return all_scores(context, weight, normed).row_range(0, rows.targets.count);
}

void score_head(const Context& context, const Head& head, const DeviceBatch& batch, const ScorePass& pass,
                const LossOptions& options, const std::function<void(const View& scores)>& take) {
  const ArenaFrame frame(context.arena);
  const HeadRows rows = head_begin(context, head.norm, batch, pass.x, pass.dx, options);
  if (rows.targets.count > 0) {
    const ArenaFrame inner(context.arena);
    const View normed = converted(context, rows.normed, head.weight.weight.dtype);
    const View scores = all_scores(context, head.weight, normed);
    take(scores.row_range(0, rows.targets.count));
    backward(context, head.weight, normed, scores, rows, options.first);
  } else if (options.first && head.weight.gradient.defined()) {
    context.kernels.zero(head.weight.gradient, context.stream);
  }
  head_finish(context, head.norm, pass.x, rows, pass.dx, options);
}

}  // namespace lm
