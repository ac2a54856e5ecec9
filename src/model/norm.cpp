#include "model/norm.h"

namespace lm {
namespace {

constexpr int64_t kSumRows = 64;  // rows per partial sum of the weight's gradient (kernels.h)

}  // namespace

void norm_forward(const Context& context, const Param& norm, const View& x, const View& out, const View& rstd,
                  Groups groups) {
  switch (groups.kind) {
    case NormKind::kRms:
      context.kernels.rms_norm_forward({.x = x.data,
                                        .weight = norm.weight.data,
                                        .out = out.data,
                                        .rstd = rstd.floats(),
                                        .rows = x.rows,
                                        .groups = groups.groups,
                                        .width = groups.width,
                                        .x_stride = x.stride,
                                        .out_stride = out.stride,
                                        .eps = static_cast<float>(context.spec.rms_eps),
                                        .dtype = context.dtype},
                                       context.stream);
      return;
  }
}

void norm_forward_residual(const Context& context, NormKind kind, const Param& norm, const View& x,
                           const View& residual, const View& sum, const View& out, const View& rstd) {
  switch (kind) {
    case NormKind::kRms:
      context.kernels.rms_norm_forward({.x = x.data,
                                        .residual = residual.data,
                                        .weight = norm.weight.data,
                                        .sum = sum.data,
                                        .out = out.data,
                                        .rstd = rstd.floats(),
                                        .rows = x.rows,
                                        .groups = 1,
                                        .width = x.columns,
                                        .x_stride = x.stride,
                                        .out_stride = out.stride,
                                        .eps = static_cast<float>(context.spec.rms_eps),
                                        .dtype = context.dtype},
                                       context.stream);
      return;
  }
}

void norm_backward(const Context& context, const Param& norm, const View& dy, const View& x, const View& rstd,
                   const View& dresidual, const View& dx, Groups groups, bool first) {
  const ArenaFrame frame(context.arena);
  const bool trained = norm.gradient.defined();
  View dweight, partial;
  if (trained) {
    dweight = context.tensor(groups.width, 1, DType::kF32);
    partial = context.tensor((x.rows + kSumRows - 1) / kSumRows, groups.width, DType::kF32);
  }
  switch (groups.kind) {
    case NormKind::kRms:
      context.kernels.rms_norm_backward({.dy = dy.data,
                                         .x = x.data,
                                         .weight = norm.weight.data,
                                         .rstd = rstd.floats(),
                                         .dresidual = dresidual.data,
                                         .dx = dx.data,
                                         .dweight = dweight.floats(),
                                         .partial = partial.floats(),
                                         .rows = x.rows,
                                         .groups = groups.groups,
                                         .width = groups.width,
                                         .dy_stride = dy.stride,
                                         .x_stride = x.stride,
                                         .dx_stride = dx.stride,
                                         .dtype = context.dtype},
                                        context.stream);
      break;
  }
  if (trained) add_vector_gradient(context, norm.gradient, dweight.floats(), first);
}

}  // namespace lm
