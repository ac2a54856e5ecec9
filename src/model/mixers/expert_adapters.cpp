#include "model/mixers/expert_adapters.h"

#include <algorithm>

#include "base/error.h"

namespace lm {
namespace {

// The matrix without its pair.
Linear base_of(const Linear& linear) {
  return {linear.weight, linear.bias, {}};
}

// A pair's work on an expert's rows, in the pair's type. What it takes of the arena is for as many rows as an
// expert can have, all tokens: it must not depend on what the router chooses.
struct PairPass {
  const Context& context;
  const Adapter& pair;
  int64_t rows = 0, most = 0;

  PairPass(const Context& of, const Adapter& adapter, const DeviceBatch& batch, int64_t used)
      : context(of), pair(adapter), rows(used), most(std::max(used, of.rounded(batch.tokens))) {}

  View tensor(int64_t columns) const {
    return context.tensor(most, columns, pair.a.weight.dtype).row_range(0, rows);
  }
  // x itself, or a copy.
  View typed(const View& x) const {
    if (x.dtype == pair.a.weight.dtype) return x;
    const View copy = tensor(x.columns);
    context.kernels.copy_rows({.from = x, .to = copy}, context.stream);
    return copy;
  }
  // y += a Bᵀ.
  void add_output(const View& a, const View& y) const { add(a, pair.b.weight, true, y); }
  // dx += a A.
  void add_input_gradient(const View& a, const View& dx) const { add(a, pair.a.weight, false, dx); }
  // s x Aᵀ.
  View reduced(const View& x) const {
    const View out = tensor(pair.rank());
    context.kernels.gemm({.a = x, .b = pair.a.weight, .out = out, .transpose_b = true, .scale = pair.scale},
                         context.stream);
    return out;
  }
  // s dy B.
  View dreduced(const View& dy) const {
    const View out = tensor(pair.rank());
    context.kernels.gemm({.a = dy, .b = pair.b.weight, .out = out, .scale = pair.scale}, context.stream);
    return out;
  }

 private:
  // In another type than the pair's the sum is made in a copy, and rounded once.
  void add(const View& a, const View& b, bool transpose_b, const View& sum) const {
    const View in = typed(sum);
    context.kernels.gemm({.a = a, .b = b, .out = in, .addend = in, .transpose_b = transpose_b},
                         context.stream);
    if (in.data != sum.data) context.kernels.copy_rows({.from = in, .to = sum}, context.stream);
  }
};

void add_pair_gradient(const Context& context, const View& gradient, const View& dy, const View& x,
                       GradientSum sum) {
  if (sum != GradientSum::kAddedWhole)
    return add_weight_gradient(context, gradient, dy, x, sum == GradientSum::kOverwritten);
  const ArenaFrame frame(context.arena);
  const View own = context.like(gradient);
  add_weight_gradient(context, own, dy, x, true);
  accumulate(context, gradient, own);
}

}  // namespace

void expert_forward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                    std::span<const LinearForward> runs) {
  linear_forward(context, base_of(linear), batch, runs);
  for (const Adapter& pair : linear.adapters) {
    for (const LinearForward& run : runs) {
      const ArenaFrame frame(context.arena);
      const PairPass of(context, pair, batch, run.x.rows);
      of.add_output(of.reduced(of.typed(run.x)), run.y);
    }
  }
}

void expert_input_gradient(const Context& context, const Linear& linear, const DeviceBatch& batch,
                           std::span<const LinearBackward> runs) {
  linear_input_gradient(context, linear, runs);
  for (const Adapter& pair : linear.adapters) {
    for (const LinearBackward& run : runs) {
      const ArenaFrame frame(context.arena);
      const PairPass of(context, pair, batch, run.dy.rows);
      of.add_input_gradient(of.dreduced(of.typed(run.dy)), run.dx);
    }
  }
}

void expert_backward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                     std::span<const LinearBackward> runs, GradientSum sum) {
  const bool trains = linear.weight.gradient.defined() || linear.bias.gradient.defined();
  LM_CHECK(!trains || runs.size() == 1, "experts' own matrices are trained where each rank has all");
  if (trains)
    linear_backward(context, base_of(linear), batch, runs.front(), {}, sum == GradientSum::kOverwritten);
  else if (runs.front().dx.defined())
    linear_input_gradient(context, linear, runs);
  for (const Adapter& pair : linear.adapters) {
    for (const LinearBackward& run : runs) {
      const ArenaFrame frame(context.arena);
      const PairPass of(context, pair, batch, run.x.rows);
      const View x = of.typed(run.x), dy = of.typed(run.dy);
      add_pair_gradient(context, pair.b.gradient, dy, of.reduced(x), sum);
      const View dreduced = of.dreduced(dy);
      add_pair_gradient(context, pair.a.gradient, dreduced, x, sum);
      if (run.dx.defined()) of.add_input_gradient(dreduced, run.dx);
    }
  }
}

void zero_pair_gradients(const Context& context, const Linear& linear) {
  for (const Adapter& pair : linear.adapters) {
    context.kernels.zero(pair.a.gradient, context.stream);
    context.kernels.zero(pair.b.gradient, context.stream);
  }
}

}  // namespace lm
