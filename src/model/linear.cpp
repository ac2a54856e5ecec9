#include "model/linear.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>

namespace lm {
namespace {

constexpr int64_t kSumRows = 64;  // rows per partial sum of the column sums (kernels.h)

void add_bias_gradient(const Context& context, const at::Tensor& gradient, const at::Tensor& dy, bool first) {
  const ArenaFrame frame(context.arena);
  const int64_t rows = dy.size(0), width = dy.size(1);
  const at::Tensor sums = context.tensor({width}, DType::kF32);
  const at::Tensor partial = context.tensor({(rows + kSumRows - 1) / kSumRows, width}, DType::kF32);
  context.kernels.sum_columns({.x = dy.data_ptr(),
                               .sums = sums.data_ptr<float>(),
                               .partial = partial.data_ptr<float>(),
                               .rows = rows,
                               .width = width,
                               .stride = dy.stride(0),
                               .dtype = context.dtype},
                              context.stream);
  add_vector_gradient(context, gradient, sums.data_ptr<float>(), first);
}

Dropout dropout_arguments(const Context& context, const Adapter& adapter, const DeviceBatch& batch,
                          const at::Tensor& x, const at::Tensor& out, bool accumulate) {
  return {.x = x.data_ptr(),
          .out = out.data_ptr(),
          .sample = batch.sample,
          .position = batch.position,
          .rows = batch.tokens(),
          .width = x.size(1),
          .key = adapter.dropout_key,
          .p = adapter.dropout,
          .accumulate = accumulate,
          .dtype = context.dtype};
}

// drop(x): x itself when dropout is off (evaluation clears the key), else a copy in the arena.
at::Tensor dropped(const Context& context, const Adapter& adapter, const DeviceBatch& batch,
                   const at::Tensor& x) {
  if (adapter.dropout_key == 0) return x;
  const at::Tensor out = context.tensor(x.sizes());
  context.kernels.dropout(dropout_arguments(context, adapter, batch, x, out, false), context.stream);
  zero_surplus(out, batch.tokens());
  return out;
}

void adapter_backward(const Context& context, const Adapter& adapter, const DeviceBatch& batch,
                      const at::Tensor& x, const at::Tensor& dy, const at::Tensor& dx,
                      const at::Tensor& reduced, bool first) {
  const ArenaFrame frame(context.arena);
  const at::Tensor dy_slice = dy.narrow(1, adapter.first, adapter.rows);
  // The scale multiplies the small factor [T, r] once and so reaches dA, dB and dx.
  at::Tensor scaled = context.tensor(reduced.sizes());
  // As a tensor: with a scalar ATen makes the product in memory of its own and copies it.
  at::mul_out(scaled, reduced, at::native::wrapped_scalar_tensor(adapter.scale));
  add_weight_gradient(context, adapter.b.gradient, dy_slice, scaled, first);
  at::Tensor dreduced = context.tensor(reduced.sizes());
  at::mm_out(dreduced, dy_slice, adapter.b.weight);
  dreduced.mul_(at::Scalar(adapter.scale));
  add_weight_gradient(context, adapter.a.gradient, dreduced, dropped(context, adapter, batch, x), first);
  if (!dx.defined()) return;
  if (adapter.dropout_key == 0) {
    at::Tensor out = dx;
    at::addmm_out(out, dx, dreduced, adapter.a.weight);
    return;
  }
  at::Tensor part = context.tensor(dx.sizes());
  at::mm_out(part, dreduced, adapter.a.weight);
  context.kernels.dropout(dropout_arguments(context, adapter, batch, part, dx, true), context.stream);
}

}  // namespace

LinearSaved allocate_saved(const Context& context, const Linear& linear, int64_t rows) {
  LinearSaved saved;
  for (const Adapter& adapter : linear.adapters) {
    saved.reduced.push_back(context.tensor({rows, adapter.a.weight.size(0)}));
  }
  return saved;
}

void linear_forward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                    const at::Tensor& x, const at::Tensor& y, LinearSaved& saved,
                    const at::Tensor* residual) {
  at::Tensor out = y;
  if (residual != nullptr) {
    at::addmm_out(out, *residual, x, linear.weight.weight.t());
  } else {
    at::mm_out(out, x, linear.weight.weight.t());
  }
  if (linear.bias.weight.defined()) {
    context.kernels.add_bias({.x = y.data_ptr(),
                              .bias = linear.bias.weight.data_ptr(),
                              .rows = y.size(0),
                              .width = y.size(1),
                              .stride = y.stride(0),
                              .dtype = context.dtype},
                             context.stream);
  }
  linear_reduce(context, linear, batch, x, saved);
  for (size_t i = 0; i < linear.adapters.size(); ++i) {
    const Adapter& adapter = linear.adapters[i];
    at::Tensor slice = y.narrow(1, adapter.first, adapter.rows);
    at::addmm_out(slice, slice, saved.reduced[i], adapter.b.weight.t(), 1, adapter.scale);
  }
}

void linear_backward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                     const at::Tensor& x, const at::Tensor& dy, const at::Tensor& dx,
                     const LinearSaved& saved, bool first) {
  if (linear.weight.gradient.defined()) add_weight_gradient(context, linear.weight.gradient, dy, x, first);
  if (linear.bias.gradient.defined()) add_bias_gradient(context, linear.bias.gradient, dy, first);
  if (dx.defined()) linear_input_gradient(linear, dy, dx);
  for (size_t i = 0; i < linear.adapters.size(); ++i) {
    adapter_backward(context, linear.adapters[i], batch, x, dy, dx, saved.reduced[i], first);
  }
}

void linear_input_gradient(const Linear& linear, const at::Tensor& dy, const at::Tensor& dx) {
  at::Tensor out = dx;
  at::mm_out(out, dy, linear.weight.weight);
}

void linear_reduce(const Context& context, const Linear& linear, const DeviceBatch& batch,
                   const at::Tensor& x, LinearSaved& saved) {
  for (size_t i = 0; i < linear.adapters.size(); ++i) {
    const ArenaFrame frame(context.arena);
    const Adapter& adapter = linear.adapters[i];
    at::mm_out(saved.reduced[i], dropped(context, adapter, batch, x), adapter.a.weight.t());
  }
}

void add_weight_gradient(const Context& context, const at::Tensor& gradient, const at::Tensor& dy,
                         const at::Tensor& x, bool first) {
  at::Tensor out = gradient;
  const bool same_type = gradient.scalar_type() == x.scalar_type();
  if (same_type) {
    if (first) {
      at::mm_out(out, dy.t(), x);
    } else {
      at::addmm_out(out, gradient, dy.t(), x);
    }
  } else if (context.device == DeviceType::kCuda) {
    if (first) {
      at::mm_out(out, dy.t(), x, gradient.scalar_type());
    } else {
      at::addmm_out(out, gradient, dy.t(), x, gradient.scalar_type());
    }
  } else {
    const ArenaFrame frame(context.arena);
    at::Tensor scratch = context.tensor(gradient.sizes());
    at::mm_out(scratch, dy.t(), x);
    context.kernels.accumulate({.to = gradient.data_ptr(),
                                .from = scratch.data_ptr(),
                                .elements = gradient.numel(),
                                .to_dtype = dtype_of(gradient),
                                .from_dtype = context.dtype,
                                .overwrite = first},
                               context.stream);
  }
}

void add_vector_gradient(const Context& context, const at::Tensor& gradient, const float* sums, bool first) {
  context.kernels.accumulate({.to = gradient.data_ptr(),
                              .from = sums,
                              .elements = gradient.numel(),
                              .to_dtype = dtype_of(gradient),
                              .from_dtype = DType::kF32,
                              .overwrite = first},
                             context.stream);
}

}  // namespace lm
