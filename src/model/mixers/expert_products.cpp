#include "model/mixers/expert_products.h"

#include <algorithm>

#include "base/error.h"
#include "model/matrix_tiles.h"

namespace lm {

void GroupedProducts::forward(const View& x, const View& y) const {
  multiply({.x = x, .out = y}, nullptr);
  add_biases(y);
  if (pair() == nullptr) return;
  const ArenaFrame frame(context.arena);
  add(reduced(typed(x)), &Adapter::b, y);
}

void GroupedProducts::input_gradient(const View& dy, const View& dx) const {
  multiply({.x = dy, .out = dx, .columns = true}, nullptr);
  if (pair() == nullptr) return;
  const ArenaFrame frame(context.arena);
  add(dreduced(typed(dy)), &Adapter::a, dx);
}

void GroupedProducts::backward(const LinearBackward& pass, bool first) const {
  gradients({.dy = pass.dy, .x = pass.x, .overwrite = first}, nullptr);
  bias_gradients(pass.dy, first);
  if (pass.dx.defined()) multiply({.x = pass.dy, .out = pass.dx, .columns = true}, nullptr);
  if (pair() == nullptr) return;
  const ArenaFrame frame(context.arena);
  const View x = typed(pass.x), dy = typed(pass.dy), of_dy = dreduced(dy);
  gradients({.dy = dy, .x = reduced(x), .overwrite = first}, &Adapter::b);
  gradients({.dy = of_dy, .x = x, .overwrite = first}, &Adapter::a);
  if (pass.dx.defined()) add(of_dy, &Adapter::a, pass.dx);
}

const Param& GroupedProducts::param(int64_t expert, Half half) const {
  const Linear& of = linear(expert);
  return half == nullptr ? of.weight : of.adapters.front().*half;
}

// The first expert's, of whose rank, type and scale all are: a stack has one pair (spec/expert_adapters.h).
const Adapter* GroupedProducts::pair() const {
  const std::vector<Adapter>& pairs = linear(0).adapters;
  if (pairs.empty()) return nullptr;
  LM_CHECK(pairs.size() == 1 && !pairs.front().dropout.on(), "an expert's matrix has one plain pair");
  return pairs.data();
}

// x itself, or a copy in the pairs' type.
View GroupedProducts::typed(const View& x) const {
  const DType type = pair()->a.weight.dtype;
  if (x.dtype == type) return x;
  const View copy = context.tensor(x.rows, x.columns, type);
  context.kernels.copy_rows({.from = x, .to = copy}, context.stream);
  return copy;
}

// s x Aᵀ.
View GroupedProducts::reduced(const View& x) const {
  const View out = context.tensor(x.rows, pair()->rank(), x.dtype);
  multiply({.x = x, .out = out, .scale = pair()->scale}, &Adapter::a);
  return out;
}

// s dy B.
View GroupedProducts::dreduced(const View& dy) const {
  const View out = context.tensor(dy.rows, pair()->rank(), dy.dtype);
  multiply({.x = dy, .out = out, .scale = pair()->scale, .columns = true}, &Adapter::b);
  return out;
}

// sum += reduced Bᵀ (A); in another type than the pairs' it is made in a copy, and rounded once.
void GroupedProducts::add(const View& reduced, Half half, const View& sum) const {
  const View in = typed(sum);
  multiply({.x = reduced, .out = in, .columns = half == &Adapter::a, .add = true}, half);
  if (in.data != sum.data) context.kernels.copy_rows({.from = in, .to = sum}, context.stream);
}

// The matrices of experts from `first` on, as many as one launch takes; returns how many.
int64_t GroupedProducts::place_weights(int64_t first, Half half, MultiplyExperts& product) const {
  int64_t count = 0, materialised = 0;
  const int64_t most = std::min(kExpertsAtOnce, std::ssize(experts) - first);
  for (; count < most; ++count) {
    LM_CHECK(linear(first + count).biases.empty(), "an expert's bias is not trained beside pairs");
    const Param& weight = param(first + count, half);
    if (weight.encoding == EncodingKind::kPlain) {
      product.weight[count] = weight.weight.data;
      continue;
    }
    if (!there(first + count)) {
      product.weight[count] = nullptr;
      continue;
    }
    materialised += weight.weight.elements();
    if (count > 0 && materialised > tile_elements(context.device)) break;
    const View out = context.like(weight.weight);
    materialise_columns(context, weight, out);
    product.weight[count] = out.data;
  }
  return count;
}

// A launch is given all rows and finds those of its experts by `start`, which a dry run does not know: there
// it has its experts' share of them.
View GroupedProducts::of_launch(const View& rows, int64_t first, int64_t count) const {
  if (context.counts == nullptr || !rows.defined()) return rows;
  const int64_t begin = rows.rows * first / std::ssize(experts);
  return rows.row_range(begin, rows.rows * (first + count) / std::ssize(experts) - begin);
}

void GroupedProducts::multiply(const MultiplyExperts& product, Half half) const {
  for (int64_t first = 0; first < std::ssize(experts);) {
    const ArenaFrame frame(context.arena);
    MultiplyExperts launch = product;
    launch.start = start + first;
    launch.count = place_weights(first, half, launch);
    launch.x = of_launch(product.x, first, launch.count);
    launch.out = of_launch(product.out, first, launch.count);
    context.kernels.multiply_experts(launch, context.stream);
    first += launch.count;
  }
}

void GroupedProducts::gradients(const ExpertGradients& of_all, Half half) const {
  for (int64_t first = 0; first < std::ssize(experts); first += kExpertsAtOnce) {
    ExpertGradients product = of_all;
    product.start = start + first;
    product.count = std::min(kExpertsAtOnce, std::ssize(experts) - first);
    product.dy = of_launch(of_all.dy, first, product.count);
    product.x = of_launch(of_all.x, first, product.count);
    bool trained = false;
    for (int64_t e = 0; e < product.count; ++e) {
      const View& gradient = param(first + e, half).gradient;
      product.gradient[e] = gradient.data;
      if (gradient.defined()) trained = true, product.gradient_dtype = gradient.dtype;
    }
    if (trained) context.kernels.expert_gradients(product, context.stream);
  }
}

void GroupedProducts::add_biases(const View& y) const {
  for (int64_t first = 0; first < std::ssize(experts); first += kExpertsAtOnce) {
    const int64_t count = std::min(kExpertsAtOnce, std::ssize(experts) - first);
    AddExpertBiases sum{.x = of_launch(y, first, count), .start = start + first};
    sum.count = count;
    bool any = false;
    for (int64_t e = 0; e < sum.count; ++e) {
      sum.bias[e] = linear(first + e).bias.weight.data;
      any = any || sum.bias[e] != nullptr;
    }
    if (any) context.kernels.add_expert_biases(sum, context.stream);
  }
}

void GroupedProducts::bias_gradients(const View& dy, bool first) const {
  for (int64_t begin = 0; begin < std::ssize(experts); begin += kExpertsAtOnce) {
    const int64_t count = std::min(kExpertsAtOnce, std::ssize(experts) - begin);
    ExpertBiasGradients sum{.dy = of_launch(dy, begin, count), .start = start + begin, .overwrite = first};
    sum.count = count;
    bool trained = false;
    for (int64_t e = 0; e < sum.count; ++e) {
      const View& gradient = linear(begin + e).bias.gradient;
      sum.gradient[e] = gradient.data;
      if (gradient.defined()) trained = true, sum.gradient_dtype = gradient.dtype;
    }
    if (trained) context.kernels.expert_bias_gradients(sum, context.stream);
  }
}

}  // namespace lm
