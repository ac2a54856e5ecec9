#include "model/mixers/expert_products.h"

#include <algorithm>

#include "base/error.h"

namespace lm {

void GroupedProducts::forward(const View& x, const View& y) const {
  multiply(x, y, false);
  add_biases(y);
}

void GroupedProducts::input_gradient(const View& dy, const View& dx) const {
  multiply(dy, dx, true);
}

// The matrices of experts from `first` on, as many as one launch takes; returns how many.
int64_t GroupedProducts::place_weights(int64_t first, MultiplyExperts& product) const {
  int64_t count = 0, materialised = 0;
  const int64_t most = std::min(kExpertsAtOnce, std::ssize(experts) - first);
  for (; count < most; ++count) {
    const Linear& expert = linear(first + count);
    LM_CHECK(!expert.adapted() && expert.biases.empty(), "an expert has no adapter");
    const Param& weight = expert.weight;
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
    materialise_matrix(context, weight, out);
    product.weight[count] = out.data;
  }
  return count;
}

void GroupedProducts::multiply(const View& x, const View& out, bool columns) const {
  for (int64_t first = 0; first < std::ssize(experts);) {
    const ArenaFrame frame(context.arena);
    MultiplyExperts product{.x = x, .out = out, .start = start + first, .columns = columns};
    product.count = place_weights(first, product);
    context.kernels.multiply_experts(product, context.stream);
    first += product.count;
  }
}

void GroupedProducts::weight_gradients(const View& dy, const View& x, bool first) const {
  for (int64_t begin = 0; begin < std::ssize(experts); begin += kExpertsAtOnce) {
    ExpertGradients product{.dy = dy, .x = x, .start = start + begin, .overwrite = first};
    product.count = std::min(kExpertsAtOnce, std::ssize(experts) - begin);
    bool trained = false;
    for (int64_t e = 0; e < product.count; ++e) {
      const View& gradient = linear(begin + e).weight.gradient;
      product.gradient[e] = gradient.data;
      if (gradient.defined()) trained = true, product.gradient_dtype = gradient.dtype;
    }
    if (trained) context.kernels.expert_gradients(product, context.stream);
  }
  bias_gradients(dy, first);
}

void GroupedProducts::add_biases(const View& y) const {
  for (int64_t first = 0; first < std::ssize(experts); first += kExpertsAtOnce) {
    AddExpertBiases sum{.x = y, .start = start + first};
    sum.count = std::min(kExpertsAtOnce, std::ssize(experts) - first);
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
    ExpertBiasGradients sum{.dy = dy, .start = start + begin, .overwrite = first};
    sum.count = std::min(kExpertsAtOnce, std::ssize(experts) - begin);
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
