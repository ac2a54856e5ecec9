#include "model/norm.h"

namespace lm {
void norm_forward(const Context& context, const Norm& norm, const View& x, const View& out, const View& rstd,
                  Groups groups) {
  switch (norm.spec.kind) {
    case NormKind::kRms:
      context.kernels.rms_norm_forward({.x = x.data,
                                        .weight = norm.weight.weight.data,
                                        .out = out.data,
                                        .rstd = rstd.floats(),
                                        .rows = x.rows,
                                        .groups = groups.groups,
                                        .width = groups.width,
                                        .x_stride = x.stride,
                                        .out_stride = out.stride,
                                        .eps = static_cast<float>(norm.spec.eps),
                                        .dtype = context.dtype},
                                       context.stream);
      return;
  }
}

void norm_forward(const Context& context, const Norm& norm, const View& x, const View& out,
                  const View& rstd) {
  norm_forward(context, norm, x, out, rstd, {1, x.columns});
}

void norm_forward_residual(const Context& context, const Norm& norm, const ResidualNorm& pass) {
  switch (norm.spec.kind) {
    case NormKind::kRms:
      context.kernels.rms_norm_forward({.x = pass.x.data,
                                        .residual = pass.residual.data,
                                        .weight = norm.weight.weight.data,
                                        .sum = pass.sum.data,
                                        .out = pass.out.data,
                                        .rstd = pass.rstd.floats(),
                                        .rows = pass.x.rows,
                                        .groups = 1,
                                        .width = pass.x.columns,
                                        .x_stride = pass.x.stride,
                                        .out_stride = pass.out.stride,
                                        .eps = static_cast<float>(norm.spec.eps),
                                        .dtype = context.dtype},
                                       context.stream);
      return;
  }
}

void norm_backward(const Context& context, const Norm& norm, const NormBackward& pass, Groups groups,
                   bool first) {
  const ArenaFrame frame(context.arena);
  const Param& weight = norm.weight;
  View dweight, partial;
  if (weight.gradient.defined()) {
    dweight = context.tensor(groups.width, 1, DType::kF32);
    partial = context.tensor((pass.x.rows + kRowBlock - 1) / kRowBlock, groups.width, DType::kF32);
  }
  switch (norm.spec.kind) {
    case NormKind::kRms:
      context.kernels.rms_norm_backward({.dy = pass.dy.data,
                                         .x = pass.x.data,
                                         .weight = weight.weight.data,
                                         .rstd = pass.rstd.floats(),
                                         .dresidual = pass.dresidual.data,
                                         .dx = pass.dx.data,
                                         .dweight = dweight.floats(),
                                         .partial = partial.floats(),
                                         .rows = pass.x.rows,
                                         .groups = groups.groups,
                                         .width = groups.width,
                                         .dy_stride = pass.dy.stride,
                                         .x_stride = pass.x.stride,
                                         .dx_stride = pass.dx.stride,
                                         .dtype = context.dtype},
                                        context.stream);
      break;
  }
  if (dweight.defined()) add_vector_gradient(context, weight.gradient, dweight.floats(), first);
}

void norm_backward(const Context& context, const Norm& norm, const NormBackward& pass, bool first) {
  norm_backward(context, norm, pass, {1, pass.x.columns}, first);
}

}  // namespace lm
