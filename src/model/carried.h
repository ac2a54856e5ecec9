// What blocks give to later ones beside the residual stream, of one micro-batch: keys and values that other
// layers read, and the layers' inputs from the embedding stage; in the backward pass the gradients of both on
// the way back. All of it lies in the arena from the embedding's forward pass until its backward pass.
#pragma once

#include <vector>

#include "model/context.h"

namespace lm {

struct Carried {
  // Of a layer that lends its keys and values: [T, 2 n_kv d] of the model's type, and the sum of what the
  // borrowers' backward passes give back, fp32. Else undefined.
  struct Lent {
    View rows, gradient;
  };
  std::vector<Lent> lent;  // by layer
  View inputs;             // [T, L P]; undefined where layers have none
  View input_gradient;     // likewise; undefined where nobody wants it
};

// Memory for it. `backward`: a backward pass follows; `train_inputs`: it goes on to what made the inputs.
Carried allocate_carried(const Context& context, int64_t rows, bool backward, bool train_inputs);

// A backward pass begins: the borrowers' gradients add up from zero.
void zero_lent_gradients(const Context& context, const Carried& carried);

}  // namespace lm
