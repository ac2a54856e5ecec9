// P-tuning's encoder: an MLP makes the embeddings of virtual tokens from trained ones, row by row. It works
// in the type of what is trained, which need not be the model's. Nothing of it stays from forward to
// backward: its products have as many rows as there are virtual tokens, and are made again.
#pragma once

#include <array>

#include "model/linear.h"

namespace lm {

struct PromptEncoder {
  // [E, H], [E, E] and [H, E] with biases, and a ReLU between each two; undefined weights: there is no
  // encoder.
  std::array<Linear, 3> layers;
  bool on() const { return layers.front().weight.weight.defined(); }
};

// The embeddings [n, H] of tokens [n, H], in the arena.
View encoder_forward(const Context& context, const PromptEncoder& encoder, const View& tokens);

// From the gradient [n, H] of these embeddings, fp32, to those of the layers and of `tokens`. `first`: the
// gradients' memory has no value yet.
void encoder_backward(const Context& context, const PromptEncoder& encoder, const Param& tokens,
                      const View& gradient, bool first);

}  // namespace lm
