#include "model/layer_inputs.h"

#include <cmath>
#include <numbers>

#include "base/host_device.h"

namespace lm {
namespace {

constexpr float kHalf = static_cast<float>(1 / std::numbers::sqrt2);  // of a sum of two

void scale(const Context& context, const View& x, double factor) {
  context.kernels.scale({.x = x, .out = x, .factor = static_cast<float>(factor)}, context.stream);
}

double projection_scale(const Context& context) {
  return 1 / std::sqrt(static_cast<double>(context.spec.hidden));
}

Groups groups_of(const Context& context, const View& all) {
  const int64_t width = context.spec.embedding.inputs.width;
  return {all.columns / width, width};
}

// out [T, L P], before the norm.
void project(const Context& context, const LayerInputs& inputs, const DeviceBatch& batch, const View& x,
             const View& out) {
  LinearSaved none;
  linear_forward(context, inputs.projection, batch, {x, out}, none);
  scale(context, out, projection_scale(context));
}

}  // namespace

float input_scale(const InputsSpec& spec, DType dtype) {
  const auto factor = static_cast<float>(std::sqrt(static_cast<double>(spec.width)));
  return as_stored(dtype, factor);
}

void layer_inputs_forward(const Context& context, const LayerInputs& inputs, const DeviceBatch& batch,
                          const View& x, const View& out) {
  const ArenaFrame frame(context.arena);
  const View rows = context.like(out);
  project(context, inputs, batch, x, rows);
  norm_forward(context, inputs.norm, rows, out, {}, groups_of(context, out));
  context.kernels.gather_rows({.table = inputs.table.weight.data,
                               .index = batch.token,
                               .out = rows.data,
                               .rows = batch.tokens,
                               .width = rows.columns,
                               .scale = input_scale(context.spec.embedding.inputs, context.dtype),
                               .dtype = context.dtype},
                              context.stream);
  zero_surplus(context, rows, batch.tokens);
  accumulate(context, out, rows);
  scale(context, out, kHalf);
}

void layer_inputs_backward(const Context& context, const LayerInputs& inputs, const DeviceBatch& batch,
                           const LayerInputsBackward& pass, bool first) {
  const auto& [x, gradient, dx] = pass;
  const ArenaFrame frame(context.arena);
  const Groups groups = groups_of(context, gradient);
  scale(context, gradient, kHalf);
  const View projected = context.like(gradient), dprojected = context.like(gradient),
             rstd = context.tensor(gradient.rows, groups.groups, DType::kF32), part = context.like(dx);
  project(context, inputs, batch, x, projected);
  norm_forward(context, inputs.norm, projected, dprojected, rstd, groups);
  norm_backward(context, inputs.norm, {.dy = gradient, .x = projected, .rstd = rstd, .dx = dprojected},
                groups, first);
  scale(context, dprojected, projection_scale(context));
  linear_backward(context, inputs.projection, batch, {x, dprojected, part}, {}, first);
  accumulate(context, dx, part);
}

}  // namespace lm
