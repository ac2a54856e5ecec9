#include "model/dora.h"

#include <algorithm>

#include "model/matrix_tiles.h"

namespace lm {
namespace {

const void* from_row(const View& vector, int64_t row) {
  return vector.defined() ? vector.row_range(row, 1).data : nullptr;
}

// Of rows of W, in the adapter's type.
void norms_of(const Context& context, const Adapter& adapter, const View& product, const View& weight,
              int64_t first, const LinearSaved& saved) {
  const int64_t row = first - adapter.first;  // of the adapter
  const View b = adapter.b.weight.row_range(row, weight.rows);
  View rows = weight;
  if (rows.dtype != b.dtype) {
    rows = context.tensor(weight.rows, weight.columns, b.dtype);
    context.kernels.copy_rows({.from = weight, .to = rows}, context.stream);
  }
  const View h = context.tensor(rows.rows, b.columns, b.dtype);
  context.kernels.gemm({.a = rows, .b = adapter.a.weight, .out = h, .transpose_b = true}, context.stream);
  context.kernels.gemm(
      {.a = b, .b = product, .out = h, .addend = h, .scale = adapter.scale, .addend_scale = 2},
      context.stream);
  context.kernels.adapted_norms({.weight = weight,
                                 .b = b,
                                 .h = h,
                                 .magnitude = from_row(adapter.magnitude.weight, row),
                                 .scale = adapter.scale,
                                 .norms = saved.norms.floats() + first,
                                 .factors = saved.factors.floats() + first},
                                context.stream);
}

}  // namespace

bool scales_rows(const Linear& linear) {
  return !linear.adapters.empty() && linear.adapters.front().magnitude.weight.defined();
}

std::vector<View> adapter_products(const Context& context, const Linear& linear) {
  std::vector<View> out;
  for (const Adapter& adapter : linear.adapters) {
    const View& a = adapter.a.weight;
    out.push_back(context.tensor(a.rows, a.rows, a.dtype));
    context.kernels.gemm({.a = a, .b = a, .out = out.back(), .transpose_b = true}, context.stream);
  }
  return out;
}

void save_norms(const Context& context, const Linear& linear, const std::vector<View>& products,
                const View& weight, int64_t first, const LinearSaved& saved) {
  // Where W is copied into the adapters' type, so much of it at once.
  const int64_t most = std::max<int64_t>(tile_elements(DeviceType::kCpu) / weight.columns, 1);
  for (size_t i = 0; i < linear.adapters.size(); ++i) {
    const Adapter& adapter = linear.adapters[i];
    const int64_t end = std::min(first + weight.rows, adapter.first + adapter.rows);
    const int64_t each = adapter.a.weight.dtype == weight.dtype ? weight.rows : most;
    for (int64_t row = std::max(first, adapter.first); row < end; row += each) {
      const ArenaFrame frame(context.arena);
      norms_of(context, adapter, products[i], weight.row_range(row - first, std::min(each, end - row)), row,
               saved);
    }
  }
}

void scale_output(const Context& context, const Linear& linear, const LinearForward& pass,
                  const LinearSaved& saved) {
  each_run(linear, linear.adapters, [&](int64_t first, int64_t rows, const Adapter* adapter) {
    const View& residual = pass.residual;
    context.kernels.scale_columns(
        {.x = saved.product.column_range(first, rows),
         .out = pass.y.column_range(first, rows),
         .factors = adapter != nullptr ? saved.factors.floats() + first : nullptr,
         .bias = from_row(linear.bias.weight, first),
         .addend = residual.defined() ? residual.column_range(first, rows) : View()},
        context.stream);
  });
}

void add_scaled(const Context& context, const View& z, const View& base, const View& y,
                const float* factors) {
  context.kernels.scale_columns({.x = z, .out = y, .factors = factors, .addend = y, .subtrahend = base},
                                context.stream);
}

View scale_gradient(const Context& context, const Linear& linear, const View& dy, const LinearSaved& saved,
                    View* rest, bool first_batch) {
  const View out = context.tensor(dy.rows, dy.columns);
  if (rest != nullptr) *rest = context.like(out);
  each_run(linear, linear.adapters, [&](int64_t first, int64_t rows, const Adapter* adapter) {
    const View from = dy.column_range(first, rows), to = out.column_range(first, rows);
    if (adapter == nullptr) return context.kernels.copy_rows({.from = from, .to = to}, context.stream);
    const ArenaFrame frame(context.arena);
    const View sums = context.tensor(rows, 1, DType::kF32);
    const View partial = context.tensor((dy.rows + kRowBlock - 1) / kRowBlock, rows, DType::kF32);
    context.kernels.scale_columns_backward(
        {.dy = from,
         .x = saved.product.column_range(first, rows),
         .out = to,
         .rest = rest != nullptr ? rest->column_range(first, rows) : View(),
         .factors = saved.factors.floats() + first,
         .norms = saved.norms.floats() + first,
         .sums = sums.floats(),
         .partial = partial.floats()},
        context.stream);
    add_vector_gradient(context, adapter->magnitude.gradient, sums.floats(), first_batch);
  });
  return out;
}

}  // namespace lm
