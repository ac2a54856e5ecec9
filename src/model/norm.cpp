#include "model/norm.h"

namespace lm {
namespace {

constexpr int64_t kSumRows = 64;  // rows per partial sum of the weight's gradient (kernels.h)

float* float_data(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.data_ptr<float>() : nullptr;
}

}  // namespace

void norm_forward(const Context& context, const Param& norm, const at::Tensor& x, const at::Tensor& out,
                  const at::Tensor& rstd, Groups groups) {
  context.kernels.rms_norm_forward({.x = x.data_ptr(),
                                    .weight = norm.weight.data_ptr(),
                                    .out = out.data_ptr(),
                                    .rstd = float_data(rstd),
                                    .rows = x.size(0),
                                    .groups = groups.groups,
                                    .width = groups.width,
                                    .x_stride = x.stride(0),
                                    .out_stride = out.stride(0),
                                    .eps = static_cast<float>(context.spec.rms_eps),
                                    .dtype = context.dtype},
                                   context.stream);
}

void norm_forward_residual(const Context& context, const Param& norm, const at::Tensor& x,
                           const at::Tensor& residual, const at::Tensor& sum, const at::Tensor& out,
                           const at::Tensor& rstd) {
  context.kernels.rms_norm_forward({.x = x.data_ptr(),
                                    .residual = residual.data_ptr(),
                                    .weight = norm.weight.data_ptr(),
                                    .sum = sum.data_ptr(),
                                    .out = out.data_ptr(),
                                    .rstd = float_data(rstd),
                                    .rows = x.size(0),
                                    .groups = 1,
                                    .width = x.size(1),
                                    .x_stride = x.stride(0),
                                    .out_stride = out.stride(0),
                                    .eps = static_cast<float>(context.spec.rms_eps),
                                    .dtype = context.dtype},
                                   context.stream);
}

void norm_backward(const Context& context, const Param& norm, const at::Tensor& dy, const at::Tensor& x,
                   const at::Tensor& rstd, const at::Tensor& dresidual, const at::Tensor& dx, Groups groups,
                   bool first) {
  const ArenaFrame frame(context.arena);
  const bool trained = norm.gradient.defined();
  at::Tensor dweight, partial;
  if (trained) {
    dweight = context.tensor({groups.width}, DType::kF32);
    partial = context.tensor({(x.size(0) + kSumRows - 1) / kSumRows, groups.width}, DType::kF32);
  }
  context.kernels.rms_norm_backward({.dy = dy.data_ptr(),
                                     .x = x.data_ptr(),
                                     .weight = norm.weight.data_ptr(),
                                     .rstd = float_data(rstd),
                                     .dresidual = dresidual.defined() ? dresidual.data_ptr() : nullptr,
                                     .dx = dx.data_ptr(),
                                     .dweight = float_data(dweight),
                                     .partial = float_data(partial),
                                     .rows = x.size(0),
                                     .groups = groups.groups,
                                     .width = groups.width,
                                     .dy_stride = dy.stride(0),
                                     .x_stride = x.stride(0),
                                     .dx_stride = dx.stride(0),
                                     .dtype = context.dtype},
                                    context.stream);
  if (trained) add_vector_gradient(context, norm.gradient, dweight.data_ptr<float>(), first);
}

}  // namespace lm
