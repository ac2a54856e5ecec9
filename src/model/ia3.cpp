#include "model/ia3.h"

#include "base/error.h"

namespace lm {
namespace {

// The factors in fp32, copied into the arena where they have another type.
const float* in_fp32(const Context& context, const View& factors) {
  if (factors.dtype == DType::kF32) return factors.floats();
  const View copy = context.tensor(1, factors.rows, DType::kF32);
  context.kernels.copy_rows(
      {.from = view_of(static_cast<std::byte*>(factors.data), factors.dtype, 1, factors.rows), .to = copy},
      context.stream);
  return copy.floats();
}

// Calls body(first, rows, scale) for each scaled run of rows, and with null for those between.
template <class Body>
void each_run(const Linear& linear, const Body& body) {
  int64_t row = 0;
  for (const OutputScale& scale : linear.scales) {
    if (row < scale.first) body(row, scale.first - row, nullptr);
    body(scale.first, scale.rows, &scale);
    row = scale.first + scale.rows;
  }
  const int64_t all = linear.weight.weight.rows;
  if (row < all) body(row, all - row, nullptr);
}

// out = factors * dy, and the gradient of the factors of x. `out` may not be dy.
void scaled_backward(const Context& context, const Param& factors, const View& dy, const View& x,
                     const View& out, bool first) {
  const ArenaFrame frame(context.arena);
  const View sums = context.tensor(dy.columns, 1, DType::kF32);
  const View partial = context.tensor((dy.rows + kRowBlock - 1) / kRowBlock, dy.columns, DType::kF32);
  context.kernels.scale_columns_backward({.dy = dy,
                                          .x = x,
                                          .out = out,
                                          .factors = in_fp32(context, factors.weight),
                                          .sums = sums.floats(),
                                          .partial = partial.floats()},
                                         context.stream);
  if (factors.gradient.defined()) add_vector_gradient(context, factors.gradient, sums.floats(), first);
}

// The gradient of W x + b: dy, or what outputs were scaled by times it, in the arena.
View product_gradient(const Context& context, const Linear& linear, const View& dy, const LinearSaved& saved,
                      bool first_batch) {
  if (linear.scales.empty()) return dy;
  const View out = context.tensor(dy.rows, dy.columns);
  each_run(linear, [&](int64_t first, int64_t rows, const OutputScale* scale) {
    const View from = dy.column_range(first, rows), to = out.column_range(first, rows);
    if (scale == nullptr) return context.kernels.copy_rows({.from = from, .to = to}, context.stream);
    scaled_backward(context, scale->factors, from, saved.product.column_range(first, rows), to, first_batch);
  });
  return out;
}

}  // namespace

bool has_scales(const Linear& linear) {
  return !linear.scales.empty() || linear.input_scale.weight.defined();
}

void scales_forward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                    const LinearForward& pass, LinearSaved& saved) {
  LM_CHECK(linear.adapters.empty(), "IA3 beside LoRA");
  const ArenaFrame frame(context.arena);
  const Linear plain{linear.weight, linear.bias, {}};
  LinearSaved none;
  View x = pass.x;
  if (linear.input_scale.weight.defined()) {
    x = context.tensor(pass.x.rows, pass.x.columns);
    context.kernels.scale_columns(
        {.x = pass.x, .out = x, .factors = in_fp32(context, linear.input_scale.weight)}, context.stream);
  }
  if (linear.scales.empty()) return linear_forward(context, plain, batch, {x, pass.y, pass.residual}, none);
  linear_forward(context, plain, batch, {.x = x, .y = saved.product}, none);
  if (!pass.y.defined()) return;
  each_run(linear, [&](int64_t first, int64_t rows, const OutputScale* scale) {
    const ArenaFrame run(context.arena);
    context.kernels.scale_columns(
        {.x = saved.product.column_range(first, rows),
         .out = pass.y.column_range(first, rows),
         .factors = scale != nullptr ? in_fp32(context, scale->factors.weight) : nullptr,
         .addend = pass.residual.defined() ? pass.residual.column_range(first, rows) : View()},
        context.stream);
  });
}

void scales_backward(const Context& context, const Linear& linear, const LinearBackward& pass,
                     const LinearSaved& saved, bool first) {
  const ArenaFrame frame(context.arena);
  const View dz = product_gradient(context, linear, pass.dy, saved, first);
  if (!linear.input_scale.weight.defined()) {
    if (pass.dx.defined()) linear_input_gradient(context, linear, dz, pass.dx);
    return;
  }
  const View dinput = context.tensor(pass.x.rows, pass.x.columns);  // of the scaled input
  linear_input_gradient(context, linear, dz, dinput);
  const View dx = pass.dx.defined() ? pass.dx : context.like(dinput);
  scaled_backward(context, linear.input_scale, dinput, pass.x, dx, first);
}

}  // namespace lm
