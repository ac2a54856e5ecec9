#include "model/adapter_products.h"

#include <algorithm>

#include "model/dora.h"

namespace lm {
namespace {

int64_t rank_sum(const Linear& linear) {
  int64_t sum = 0;
  for (const Adapter& adapter : linear.adapters) sum += adapter.a.weight.rows;
  return sum;
}

bool drops(const Linear& linear) {
  return linear.adapters.front().dropout.on();
}

// Calls body(adapter, its columns of `all`), which are as many as its rank, for each.
template <class Body>
void each_side(const Linear& linear, const View& all, const Body& body) {
  int64_t column = 0;
  for (const Adapter& adapter : linear.adapters) {
    body(adapter, all.column_range(column, adapter.a.weight.rows));
    column += adapter.a.weight.rows;
  }
}

// A of all adapters, one below the other; copied into the arena where there are several.
View stacked_a(const Context& context, const Linear& linear) {
  if (linear.adapters.size() == 1) return linear.adapters.front().a.weight;
  const View all = context.tensor(rank_sum(linear), linear.adapters.front().a.weight.columns);
  int64_t row = 0;
  for (const Adapter& adapter : linear.adapters) {
    const View& a = adapter.a.weight;
    context.kernels.copy_rows({.from = a, .to = all.row_range(row, a.rows)}, context.stream);
    row += a.rows;
  }
  return all;
}

// gradient (+)= scale dyᵀ x, in one product.
void add_product(const Context& context, const View& gradient, const View& dy, const View& x, float scale,
                 bool first) {
  context.kernels.gemm({.a = dy,
                        .b = x,
                        .out = gradient,
                        .addend = first ? View() : gradient,
                        .transpose_a = true,
                        .scale = scale},
                       context.stream);
}

}  // namespace

bool products_first(const Context& context, const Linear& linear) {
  if (context.device != DeviceType::kCuda || linear.adapters.empty() || scales_rows(linear)) return false;
  return std::ranges::all_of(linear.adapters, [&](const Adapter& adapter) {
    return adapter.a.weight.dtype == context.dtype && adapter.dropout.on() == drops(linear) &&
           !adapter.start_a.defined();
  });
}

bool outputs_first(const Context& context, const Linear& linear) {
  if (!products_first(context, linear)) return false;
  int64_t row = 0;
  for (const Adapter& adapter : linear.adapters) {
    if (adapter.first != row) return false;
    row += adapter.rows;
  }
  return row == linear.weight.weight.rows;
}

bool reduces_together(const Context& context, const Linear& linear) {
  return products_first(context, linear) && !drops(linear);
}

std::vector<View> allocate_reduced(const Context& context, const Linear& linear, int64_t rows,
                                   View* together) {
  std::vector<View> out;
  *together = context.tensor(rows, rank_sum(linear));
  each_side(linear, *together, [&](const Adapter&, const View& own) { out.push_back(own); });
  return out;
}

void reduce_together(const Context& context, const Linear& linear, const View& x, const View& reduced) {
  const ArenaFrame frame(context.arena);
  context.kernels.gemm({.a = x, .b = stacked_a(context, linear), .out = reduced, .transpose_b = true},
                       context.stream);
}

View reduced_gradients(const Context& context, const Linear& linear, const View& dy) {
  const View all = context.tensor(dy.rows, rank_sum(linear));
  each_side(linear, all, [&](const Adapter& adapter, const View& own) {
    context.kernels.gemm({.a = dy.column_range(adapter.first, adapter.rows),
                          .b = adapter.b.weight,
                          .out = own,
                          .scale = adapter.scale},
                         context.stream);
  });
  return all;
}

void begin_input_gradient(const Context& context, const Linear& linear, const DeviceBatch& batch,
                          const View& dreduced, const View& dx) {
  const ArenaFrame frame(context.arena);
  if (!drops(linear)) {
    context.kernels.gemm({.a = dreduced, .b = stacked_a(context, linear), .out = dx}, context.stream);
    return;
  }
  const View part = context.like(dx);
  bool begun = false;
  each_side(linear, dreduced, [&](const Adapter& adapter, const View& own) {
    context.kernels.gemm({.a = own, .b = adapter.a.weight, .out = part}, context.stream);
    begun ? add_dropped(context, adapter.dropout, batch, part, dx)
          : drop(context, adapter.dropout, batch, part, dx);
    begun = true;
  });
}

void add_adapter_gradients(const Context& context, const Linear& linear, const DeviceBatch& batch,
                           const LinearBackward& pass, const LinearSaved& saved,
                           const ReducedGradients& reduced) {
  const auto& [x, dy, dx] = pass;
  const auto& [dreduced, first] = reduced;
  for (size_t i = 0; i < linear.adapters.size(); ++i) {
    const Adapter& adapter = linear.adapters[i];
    add_product(context, adapter.b.gradient, dy.column_range(adapter.first, adapter.rows), saved.reduced[i],
                adapter.scale, first);
  }
  const ArenaFrame frame(context.arena);
  if (linear.adapters.size() == 1 && !drops(linear))
    return add_product(context, linear.adapters.front().a.gradient, dreduced, x, 1, first);
  if (drops(linear)) {
    const View dropped = context.like(x);
    each_side(linear, dreduced, [&, &x = x, &first = first](const Adapter& adapter, const View& own) {
      drop(context, adapter.dropout, batch, x, dropped);
      add_product(context, adapter.a.gradient, own, dropped, 1, first);
    });
    return;
  }
  const View all = context.tensor(dreduced.columns, x.columns, DType::kF32);
  add_product(context, all, dreduced, x, 1, true);
  int64_t row = 0;
  for (const Adapter& adapter : linear.adapters) {
    const View& gradient = adapter.a.gradient;
    accumulate(context, gradient, all.row_range(row, gradient.rows), first);
    row += gradient.rows;
  }
}

}  // namespace lm
