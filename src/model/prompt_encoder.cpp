#include "model/prompt_encoder.h"

namespace lm {
namespace {

Context in_type(const Context& context, DType dtype) {
  Context out = context;
  out.dtype = dtype;
  return out;
}

View multiply(const Context& context, const Linear& layer, const View& x) {
  const View y = context.tensor(x.rows, layer.weight.weight.rows);
  LinearSaved nothing;
  linear_forward(context, layer, DeviceBatch(), {.x = x, .y = y}, nothing);
  return y;
}

// An inner layer: its product with the bias, and the ReLU of that.
struct Inner {
  View product, out;
};

Inner inner(const Context& context, const Linear& layer, const View& x) {
  const View product = multiply(context, layer, x), out = context.like(product);
  context.kernels.activation_forward({.x = product.data,
                                      .out = out.data,
                                      .elements = product.elements(),
                                      .activation = Activation::kRelu,
                                      .dtype = product.dtype},
                                     context.stream);
  return {product, out};
}

// Returns the gradient of `x` [n, in] from that of the layer's output, and adds those of its parameters.
View backward(const Context& context, const Linear& layer, const View& x, const View& dy, bool first) {
  const View dx = context.like(x);
  linear_backward(context, layer, DeviceBatch(), {.x = x, .dy = dy, .dx = dx}, {}, first);
  return dx;
}

// The gradient of the product from that of the ReLU, in the product's place.
View inner_gradient(const Context& context, const Inner& layer, const View& gradient) {
  context.kernels.activation_backward({.x = layer.product.data,
                                       .dh = gradient.data,
                                       .elements = gradient.elements(),
                                       .activation = Activation::kRelu,
                                       .dtype = gradient.dtype},
                                      context.stream);
  return layer.product;
}

}  // namespace

View encoder_forward(const Context& context, const PromptEncoder& encoder, const View& tokens) {
  const Context own = in_type(context, tokens.dtype);
  const auto& [first, second, last] = encoder.layers;
  return multiply(own, last, inner(own, second, inner(own, first, tokens).out).out);
}

void encoder_backward(const Context& context, const PromptEncoder& encoder, const Param& tokens,
                      const View& gradient, bool first) {
  const ArenaFrame frame(context.arena);
  const Context own = in_type(context, tokens.weight.dtype);
  const auto& layers = encoder.layers;
  const Inner one = inner(own, layers[0], tokens.weight), two = inner(own, layers[1], one.out);
  const View dy = own.tensor(gradient.rows, gradient.columns);
  accumulate(own, dy, gradient, true);
  const View dtwo = inner_gradient(own, two, backward(own, layers[2], two.out, dy, first)),
             done = inner_gradient(own, one, backward(own, layers[1], one.out, dtwo, first));
  accumulate(own, tokens.gradient, backward(own, layers[0], tokens.weight, done, first), first);
}

}  // namespace lm
