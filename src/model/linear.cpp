#include "model/linear.h"

#include <algorithm>

#include "base/error.h"
#include "model/adapter_products.h"
#include "model/dora.h"
#include "model/ia3.h"
#include "model/matrix_tiles.h"

namespace lm {
namespace {

void add_bias_gradient(const Context& context, const View& gradient, const View& dy, bool first) {
  const ArenaFrame frame(context.arena);
  const int64_t rows = dy.rows, width = dy.columns;
  const View sums = context.tensor(width, 1, DType::kF32);
  const View partial = context.tensor((rows + kRowBlock - 1) / kRowBlock, width, DType::kF32);
  context.kernels.sum_columns({.x = dy.data,
                               .sums = sums.floats(),
                               .partial = partial.floats(),
                               .rows = rows,
                               .width = width,
                               .stride = dy.stride,
                               .dtype = context.dtype},
                              context.stream);
  add_vector_gradient(context, gradient, sums.floats(), first);
}

// `linear` with the bias that is in use: in the arena, in the model's type, with its trained copies.
Linear with_biases(const Context& context, const Linear& linear) {
  Linear out = linear;
  out.biases.clear();
  const View& frozen = linear.bias.weight;
  const auto row = [](const View& x, int64_t first, int64_t elements) {  // a vector's elements as a row
    return view_of(x.row_range(first, elements).data, x.dtype, 1, elements);
  };
  out.bias.weight = context.tensor(frozen.rows, 1);
  const View& used = out.bias.weight;
  context.kernels.copy_rows({.from = row(frozen, 0, frozen.rows), .to = row(used, 0, used.rows)},
                            context.stream);
  for (const BiasCopy& copy : linear.biases)
    context.kernels.copy_rows(
        {.from = row(copy.values.weight, 0, copy.rows), .to = row(used, copy.first, copy.rows)},
        context.stream);
  return out;
}

void add_base_gradients(const Context& context, const Linear& linear, const LinearBackward& pass,
                        bool first) {
  const auto& [x, dy, dx] = pass;
  if (linear.weight.gradient.defined()) add_weight_gradient(context, linear.weight.gradient, dy, x, first);
  if (linear.bias.gradient.defined()) add_bias_gradient(context, linear.bias.gradient, dy, first);
  for (const BiasCopy& copy : linear.biases)
    add_bias_gradient(context, copy.values.gradient, dy.column_range(copy.first, copy.rows), first);
}

// x Wᵀ, of one row by the kernel for it where the device has one.
void multiply(const Context& context, const DeviceBatch& batch, const Gemm& product) {
  if (!batch.one_row() || context.kernels.multiply_row == nullptr)
    return context.kernels.gemm(product, context.stream);
  const bool adds = product.addend.defined();
  context.kernels.multiply_row({.x = product.a.data,
                                .weight = product.b.data,
                                .addend = adds ? product.addend.data : nullptr,
                                .out = product.out.data,
                                .rows = product.b.rows,
                                .columns = product.b.columns,
                                .stride = product.b.stride,
                                .scale = product.scale,
                                .dtype = product.a.dtype},
                               context.stream);
}

// drop(x): x itself when dropout is off, else a copy in the arena.
View dropped(const Context& context, const Adapter& adapter, const DeviceBatch& batch, const View& x) {
  if (!adapter.dropout.on()) return x;
  const View out = context.like(x);
  drop(context, adapter.dropout, batch, x, out);
  return out;
}

// An adapter of another type than the model works in its own on copies, in the arena, of what the model gives
// it: what it adds to a product is added there, and the sum rounded once.
View in_type_of(const Context& context, const Adapter& adapter, const View& x) {
  if (adapter.a.weight.dtype == x.dtype) return x;
  const View copy = context.tensor(x.rows, x.columns, adapter.a.weight.dtype);
  context.kernels.copy_rows({.from = x, .to = copy}, context.stream);
  return copy;
}

View in_type_of(const Context& context, const Linear& linear, const View& x) {
  return linear.adapters.empty() ? x : in_type_of(context, linear.adapters.front(), x);
}

// Back from such a copy.
void settle(const Context& context, const View& copy, const View& x) {
  if (copy.data != x.data) context.kernels.copy_rows({.from = copy, .to = x}, context.stream);
}

// `pair` and, beside it in a copy in the arena, what it began with, in its type: A and A0 as rows, B and -B0
// as columns. So one product with the two sums B A - B0 A0, and rounds once.
View with_start_a(const Context& context, const Adapter& adapter) {
  const View& a = adapter.a.weight;
  if (!adapter.start_a.defined()) return a;
  const View out = context.tensor(adapter.rank(), a.columns, a.dtype);
  context.kernels.copy_rows({.from = a, .to = out.row_range(0, a.rows)}, context.stream);
  context.kernels.copy_rows({.from = adapter.start_a, .to = out.row_range(a.rows, a.rows)}, context.stream);
  return out;
}

View with_start_b(const Context& context, const Adapter& adapter) {
  const View& b = adapter.b.weight;
  if (!adapter.start_b.defined()) return b;
  const View out = context.tensor(b.rows, adapter.rank(), b.dtype);
  context.kernels.copy_rows({.from = b, .to = out.column_range(0, b.columns)}, context.stream);
  context.kernels.copy_rows({.from = adapter.start_b, .to = out.column_range(b.columns, b.columns)},
                            context.stream);
  return out;
}

// `pass`: of the adapter's rows of dy.
void adapter_backward(const Context& context, const Adapter& adapter, const DeviceBatch& batch,
                      const LinearBackward& pass, const View& reduced, bool first) {
  const auto& [x, dy, dx] = pass;
  // The scale multiplies the small factor [T, r] once and so reaches dA, dB and dx.
  const View scaled = context.like(reduced);
  context.kernels.scale({.x = reduced, .out = scaled, .factor = adapter.scale}, context.stream);
  const int64_t r = adapter.a.weight.rows;
  add_weight_gradient(context, adapter.b.gradient, dy, scaled.column_range(0, r), first);
  const View dreduced = context.like(reduced);
  context.kernels.gemm({.a = dy, .b = with_start_b(context, adapter), .out = dreduced}, context.stream);
  context.kernels.scale({.x = dreduced, .out = dreduced, .factor = adapter.scale}, context.stream);
  const View of_a = dreduced.column_range(0, r);
  add_weight_gradient(context, adapter.a.gradient, of_a, dropped(context, adapter, batch, x), first);
  if (!dx.defined()) return;
  const View a = with_start_a(context, adapter);
  if (!adapter.dropout.on()) {
    context.kernels.gemm({.a = dreduced, .b = a, .out = dx, .addend = dx}, context.stream);
    return;
  }
  const View part = context.like(dx);
  context.kernels.gemm({.a = dreduced, .b = a, .out = part}, context.stream);
  add_dropped(context, adapter.dropout, batch, part, dx);
}

// saved.reduced.
void reduce(const Context& context, const Linear& linear, const DeviceBatch& batch, const View& x,
            LinearSaved& saved) {
  if (linear.adapters.empty()) return;
  if (reduces_together(context, linear)) return reduce_together(context, linear, x, saved.together);
  const ArenaFrame copies(context.arena);
  const View input = in_type_of(context, linear, x);
  for (size_t i = 0; i < linear.adapters.size(); ++i) {
    const ArenaFrame frame(context.arena);
    const Adapter& adapter = linear.adapters[i];
    multiply(context, batch,
             {.a = dropped(context, adapter, batch, input),
              .b = with_start_a(context, adapter),
              .out = saved.reduced[i],
              .transpose_b = true});
  }
}

// out = base + s B reduced, of the adapter's rows. `base` may be out, or undefined: 0.
void add_adapter(const Context& context, const DeviceBatch& batch, const Adapter& adapter,
                 const View& reduced, const View& base, const View& out) {
  const ArenaFrame frame(context.arena);
  const View sum = base.defined() ? in_type_of(context, adapter, base) : base;
  const View to = !sum.defined() || sum.dtype == out.dtype ? out : sum;
  multiply(context, batch,
           {.a = reduced,
            .b = with_start_b(context, adapter),
            .out = to,
            .addend = sum,
            .transpose_b = true,
            .scale = adapter.scale});
  settle(context, to, out);
}

// The rows of W that an adapter is on, which are one part of it.
Param rows_of(const Param& param, const Adapter& adapter) {
  Param out = param;
  if (param.encoding == EncodingKind::kPlain) {
    out.weight = param.weight.row_range(adapter.first, adapter.rows);
    return out;
  }
  out.weight.rows = adapter.rows;
  out.parts = {};
  int64_t row = 0;
  for (const Param::EncodedPart& part : param.parts) {
    if (row == adapter.first && part.rows == adapter.rows) out.parts.front() = part;
    row += part.rows;
  }
  LM_CHECK(out.parts.front().rows == adapter.rows, "an adapter is on one part of a matrix");
  return out;
}

// Where rows have trained lengths and nothing is dropped: y = (m / n) z, and what backward wants.
void forward_scaled(const Context& context, const Linear& linear, const DeviceBatch& batch,
                    const LinearForward& pass, LinearSaved& saved) {
  const ArenaFrame frame(context.arena);
  const std::vector<View> products = adapter_products(context, linear);
  const View &x = pass.x, &z = saved.product;
  each_row_tile(context, linear.weight, [&](const View& rows, int64_t first) {
    multiply(context, batch,
             {.a = x, .b = rows, .out = z.column_range(first, rows.rows), .transpose_b = true});
    save_norms(context, linear, products, rows, first, saved);
  });
  for (size_t i = 0; i < linear.adapters.size(); ++i) {
    const View slice = z.column_range(linear.adapters[i].first, linear.adapters[i].rows);
    add_adapter(context, batch, linear.adapters[i], saved.reduced[i], slice, slice);
  }
  if (pass.y.defined()) scale_output(context, linear, pass, saved);
}

// The same with dropout, when y has W x + bias already: y += (m / n) z - W drop(x).
void forward_scaled_dropped(const Context& context, const Linear& linear, const DeviceBatch& batch,
                            const LinearForward& pass, LinearSaved& saved) {
  const ArenaFrame frame(context.arena);
  const std::vector<View> products = adapter_products(context, linear);
  for (size_t i = 0; i < linear.adapters.size(); ++i) {
    const ArenaFrame slice_frame(context.arena);
    const Adapter& adapter = linear.adapters[i];
    const View z = saved.product.column_range(adapter.first, adapter.rows), base = context.like(z);
    const View input = dropped(context, adapter, batch, pass.x);
    each_row_tile(context, rows_of(linear.weight, adapter), [&](const View& rows, int64_t first) {
      multiply(context, batch,
               {.a = input, .b = rows, .out = base.column_range(first, rows.rows), .transpose_b = true});
      save_norms(context, linear, products, rows, adapter.first + first, saved);
    });
    add_adapter(context, batch, adapter, saved.reduced[i], base, z);
    if (pass.y.defined())
      add_scaled(context, z, base, pass.y.column_range(adapter.first, adapter.rows),
                 saved.factors.floats() + adapter.first);
  }
}

// dx of the base where rows have trained lengths, and the gradients of these; returns the gradient of z, in
// the arena.
View backward_scaled(const Context& context, const Linear& linear, const DeviceBatch& batch,
                     const LinearBackward& pass, const LinearSaved& saved, bool first) {
  const auto& [x, dy, dx] = pass;
  const bool drops = linear.adapters.front().dropout.on();
  View rest;
  const View dz = scale_gradient(context, linear, dy, saved, drops && dx.defined() ? &rest : nullptr, first);
  if (!dx.defined()) return dz;
  linear_input_gradient(context, linear, drops ? dy : dz, dx);
  for (const Adapter& adapter : linear.adapters) {
    if (!drops) break;
    const ArenaFrame frame(context.arena);
    Linear slice;
    slice.weight = rows_of(linear.weight, adapter);
    const View part = context.like(dx);
    linear_input_gradient(context, slice, rest.column_range(adapter.first, adapter.rows), part);
    add_dropped(context, adapter.dropout, batch, part, dx);
  }
  return dz;
}

}  // namespace

LinearSaved allocate_saved(const Context& context, const Linear& linear, int64_t rows) {
  LinearSaved saved;
  if (reduces_together(context, linear)) {
    saved.reduced = allocate_reduced(context, linear, rows, &saved.together);
    return saved;
  }
  for (const Adapter& adapter : linear.adapters) {
    saved.reduced.push_back(context.tensor(rows, adapter.rank(), adapter.a.weight.dtype));
  }
  const int64_t out = linear.weight.weight.rows;
  if (!linear.scales.empty()) saved.product = context.tensor(rows, out);
  if (!scales_rows(linear)) return saved;
  saved.product = context.tensor(rows, out);
  saved.norms = context.tensor(out, 1, DType::kF32);
  saved.factors = context.tensor(out, 1, DType::kF32);
  return saved;
}

void linear_forward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                    std::span<const LinearForward> runs) {
  LM_CHECK(!linear.adapted() && linear.biases.empty(), "nothing is trained beside the matrix");
  each_row_tile(context, linear.weight, [&](const View& rows, int64_t first) {
    for (const LinearForward& run : runs)
      multiply(context, batch,
               {.a = run.x, .b = rows, .out = run.y.column_range(first, rows.rows), .transpose_b = true});
  });
  for (const LinearForward& run : runs)
    if (linear.bias.weight.defined()) add_bias(context, linear.bias.weight, run.y);
}

void linear_forward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                    const LinearForward& pass, LinearSaved& saved) {
  const auto& [x, y, residual] = pass;
  if (!linear.biases.empty()) {
    const ArenaFrame frame(context.arena);
    return linear_forward(context, with_biases(context, linear), batch, pass, saved);
  }
  if (has_scales(linear)) return scales_forward(context, linear, batch, pass, saved);
  const bool scaled = scales_rows(linear);
  reduce(context, linear, batch, x, saved);
  if (scaled && !linear.adapters.front().dropout.on())
    return forward_scaled(context, linear, batch, pass, saved);
  const bool before = outputs_first(context, linear);
  const auto columns = [](const View& of, int64_t at, int64_t count) {
    return of.defined() ? of.column_range(at, count) : of;
  };
  for (size_t i = 0; before && i < linear.adapters.size(); ++i) {
    const Adapter& adapter = linear.adapters[i];
    add_adapter(context, batch, adapter, saved.reduced[i], columns(residual, adapter.first, adapter.rows),
                y.column_range(adapter.first, adapter.rows));
  }
  const View addend = before ? y : residual;
  // By rows of W forward, by its columns backward: no product's sum is cut.
  each_row_tile(context, linear.weight, [&, &x = x, &y = y](const View& rows, int64_t first) {
    multiply(context, batch,
             {.a = x,
              .b = rows,
              .out = y.column_range(first, rows.rows),
              .addend = columns(addend, first, rows.rows),
              .transpose_b = true});
  });
  if (linear.bias.weight.defined()) add_bias(context, linear.bias.weight, y);
  if (scaled) return forward_scaled_dropped(context, linear, batch, pass, saved);
  for (size_t i = 0; !before && i < linear.adapters.size(); ++i) {
    const View slice = y.column_range(linear.adapters[i].first, linear.adapters[i].rows);
    add_adapter(context, batch, linear.adapters[i], saved.reduced[i], slice, slice);
  }
}

void add_trained_gradients(const Context& context, const Linear& linear, const DeviceBatch& batch,
                           const LinearBackward& pass, const LinearSaved& saved,
                           const ReducedGradients& reduced) {
  add_base_gradients(context, linear, pass, reduced.first);
  add_adapter_gradients(context, linear, batch, pass, saved, reduced);
}

void linear_backward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                     const LinearBackward& pass, const LinearSaved& saved, bool first) {
  const auto& [x, dy, dx] = pass;
  if (has_scales(linear)) return scales_backward(context, linear, pass, saved, first);
  const ArenaFrame frame(context.arena);
  if (products_first(context, linear)) {
    const View dreduced = adapted_input_gradient(context, linear, batch, dy, dx);
    return add_trained_gradients(context, linear, batch, pass, saved, {dreduced, first});
  }
  add_base_gradients(context, linear, pass, first);
  View dz = dy;  // of W x and the adapters together
  if (scales_rows(linear))
    dz = backward_scaled(context, linear, batch, pass, saved, first);
  else if (dx.defined())
    linear_input_gradient(context, linear, dy, dx);
  if (linear.adapters.empty()) return;
  const View input = in_type_of(context, linear, x);
  const View sum = dx.defined() ? in_type_of(context, linear, dx) : dx;
  for (size_t i = 0; i < linear.adapters.size(); ++i) {
    const ArenaFrame slice_frame(context.arena);
    const Adapter& adapter = linear.adapters[i];
    const View dy_slice = in_type_of(context, linear, dz.column_range(adapter.first, adapter.rows));
    adapter_backward(context, adapter, batch, {input, dy_slice, sum}, saved.reduced[i], first);
  }
  if (dx.defined()) settle(context, sum, dx);
}

View adapted_input_gradient(const Context& context, const Linear& linear, const DeviceBatch& batch,
                            const View& dy, const View& dx) {
  const View dreduced = reduced_gradients(context, linear, dy);
  if (!dx.defined()) return dreduced;
  begin_input_gradient(context, linear, batch, dreduced, dx);
  linear_input_gradient(context, linear, dy, dx, dx);
  return dreduced;
}

void linear_input_gradient(const Context& context, const Linear& linear, const View& dy, const View& dx,
                           const View& addend) {
  each_column_tile(context, linear.weight, [&](const View& columns, int64_t first) {
    context.kernels.gemm({.a = dy,
                          .b = columns,
                          .out = dx.column_range(first, columns.columns),
                          .addend = addend.defined() ? addend.column_range(first, columns.columns) : addend},
                         context.stream);
  });
}

void linear_input_gradient(const Context& context, const Linear& linear,
                           std::span<const LinearBackward> runs) {
  each_column_tile(context, linear.weight, [&](const View& columns, int64_t first) {
    for (const LinearBackward& run : runs)
      context.kernels.gemm({.a = run.dy, .b = columns, .out = run.dx.column_range(first, columns.columns)},
                           context.stream);
  });
}

void add_bias(const Context& context, const View& bias, const View& y) {
  context.kernels.add_bias({.x = y.data,
                            .bias = bias.data,
                            .rows = y.rows,
                            .width = y.columns,
                            .stride = y.stride,
                            .dtype = context.dtype},
                           context.stream);
}

void linear_save(const Context& context, const Linear& linear, const DeviceBatch& batch, const View& x,
                 LinearSaved& saved) {
  if (!linear.scales.empty()) return scales_forward(context, linear, batch, {.x = x, .y = {}}, saved);
  reduce(context, linear, batch, x, saved);
  if (!scales_rows(linear)) return;
  const bool drops = linear.adapters.front().dropout.on();
  drops ? forward_scaled_dropped(context, linear, batch, {.x = x, .y = {}}, saved)
        : forward_scaled(context, linear, batch, {.x = x, .y = {}}, saved);
}

void add_weight_gradient(const Context& context, const View& gradient, const View& dy, const View& x,
                         bool first) {
  // On the CPU a product of bf16 has that type: it goes to scratch, and is added in the gradient's.
  if (gradient.dtype == x.dtype || context.device == DeviceType::kCuda) {
    context.kernels.gemm(
        {.a = dy, .b = x, .out = gradient, .addend = first ? View() : gradient, .transpose_a = true},
        context.stream);
    return;
  }
  const ArenaFrame frame(context.arena);
  const View scratch = context.tensor(gradient.rows, gradient.columns);
  context.kernels.gemm({.a = dy, .b = x, .out = scratch, .transpose_a = true}, context.stream);
  accumulate(context, gradient, scratch, first);
}

void add_vector_gradient(const Context& context, const View& gradient, const float* sums, bool first) {
  context.kernels.accumulate({.to = gradient.data,
                              .from = sums,
                              .elements = gradient.elements(),
                              .to_dtype = gradient.dtype,
                              .from_dtype = DType::kF32,
                              .overwrite = first},
                             context.stream);
}

}  // namespace lm
