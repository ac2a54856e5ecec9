// What the embedding stage makes for each layer (InputsSpec), with its explicit backward: of a token's row of
// a table of their own, and of the first layer's input.
#pragma once

#include "model/norm.h"

namespace lm {

struct LayerInputs {
  Param table;        // [V', L P]
  Linear projection;  // [L P, H]
  Norm norm;          // [P], of each layer's
};

// What multiplies a row of the table, as the model's type has it.
float input_scale(const InputsSpec& spec, DType dtype);

// out [T, L P] of the embedding's output x [T, H].
void layer_inputs_forward(const Context& context, const LayerInputs& inputs, const DeviceBatch& batch,
                          const View& x, const View& out);

// From `gradient` [T, L P] of what it has made to those of the projection and its norm; it becomes that of
// the scaled rows of the table, and dx [T, H] gets x's part.
struct LayerInputsBackward {
  View x, gradient, dx;
};
void layer_inputs_backward(const Context& context, const LayerInputs& inputs, const DeviceBatch& batch,
                           const LayerInputsBackward& pass, bool first);

}  // namespace lm
