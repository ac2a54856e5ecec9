#include "model/mixers/expert_adapters.h"

namespace lm {
namespace {

// x in the type of the pair: itself, or a copy in the arena.
View in_type(const Context& context, DType type, const View& x) {
  if (x.dtype == type) return x;
  const View copy = context.tensor(x.rows, x.columns, type);
  context.kernels.copy_rows({.from = x, .to = copy}, context.stream);
  return copy;
}

// dx += s dy B A.
void add_input_gradient(const Context& context, const Adapter& pair, const View& dy, const View& dx) {
  const ArenaFrame frame(context.arena);
  const DType type = pair.a.weight.dtype;
  const View sum = in_type(context, type, dx);
  const View dreduced = context.tensor(dy.rows, pair.rank(), type);
  context.kernels.gemm(
      {.a = in_type(context, type, dy), .b = pair.b.weight, .out = dreduced, .scale = pair.scale},
      context.stream);
  context.kernels.gemm({.a = dreduced, .b = pair.a.weight, .out = sum, .addend = sum}, context.stream);
  if (sum.data != dx.data) context.kernels.copy_rows({.from = sum, .to = dx}, context.stream);
}

}  // namespace

void expert_forward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                    const LinearForward& pass) {
  const ArenaFrame frame(context.arena);
  LinearSaved saved = allocate_saved(context, linear, pass.x.rows);
  linear_forward(context, linear, batch, pass, saved);
}

void expert_input_gradient(const Context& context, const Linear& linear, const View& dy, const View& dx) {
  linear_input_gradient(context, linear, dy, dx);
  for (const Adapter& pair : linear.adapters) add_input_gradient(context, pair, dy, dx);
}

void expert_backward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                     const LinearBackward& pass, bool first) {
  const ArenaFrame frame(context.arena);
  LinearSaved saved = allocate_saved(context, linear, pass.x.rows);
  linear_save(context, linear, batch, pass.x, saved);
  linear_backward(context, linear, batch, pass, saved, first);
}

void zero_pair_gradients(const Context& context, const Linear& linear) {
  for (const Adapter& pair : linear.adapters) {
    context.kernels.zero(pair.a.gradient, context.stream);
    context.kernels.zero(pair.b.gradient, context.stream);
  }
}

}  // namespace lm
