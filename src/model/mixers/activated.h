// What MLPs share: the gated activation, and the last projection of an activation's output, backwards.
#pragma once

#include "model/adapter_products.h"
#include "model/mixers/mixer.h"

namespace lm {

// h [T, F] = activation(a) * b, of both = [a b] [T, 2 F].
inline void gated_forward(const Context& context, Activation activation, const View& both, const View& h) {
  context.kernels.gated_forward({.gate_up = both.data,
                                 .out = h.data,
                                 .rows = h.rows,
                                 .ffn = h.columns,
                                 .activation = activation,
                                 .dtype = context.dtype},
                                context.stream);
}

// From dh [T, F] to the gradient of both, which takes its place; h takes dh's.
inline void gated_backward(const Context& context, Activation activation, const View& both, const View& dh) {
  context.kernels.gated_backward({.gate_up = both.data,
                                  .dh = dh.data,
                                  .rows = dh.rows,
                                  .ffn = dh.columns,
                                  .activation = activation,
                                  .dtype = context.dtype},
                                 context.stream);
}

// From dy [T, H] of y = down(h) to the gradients of `down` and of what h was made of. activate(h) makes h
// [T, F] once more; undo(dh) makes of dh the gradient of the activation's input, which lies elsewhere, and
// leaves h in dh's place.
struct DownBackward {
  const View& dy;
  const LinearSaved& saved;
  bool first = false;  // of the step's micro-batches
};
template <class Activate, class Undo>
void activated_backward(const Context& context, const Linear& down, const DeviceBatch& batch,
                        const DownBackward& pass, const Activate& activate, const Undo& undo) {
  const auto& [dy, saved, first] = pass;
  const int64_t ffn = down.weight.weight.columns;
  // On a GPU the gradients of A and B are made behind dh, when `undo` has made h.
  if (products_first(context, down)) {
    const View dh = context.tensor(batch.rows, ffn);
    const View dreduced = adapted_input_gradient(context, down, batch, dy, dh);
    undo(dh);
    return add_trained_gradients(context, down, batch, {dh, dy}, saved, {dreduced, first});
  }
  // An adapter's backward wants h beside dh: h is computed once more, since `undo` makes it only when dh is
  // complete.
  const bool adapted = down.adapted();
  View h;
  if (adapted) {
    h = context.tensor(batch.rows, ffn);
    activate(h);
  }
  const View dh = context.tensor(batch.rows, ffn);
  if (adapted) {
    linear_backward(context, down, batch, {h, dy, dh}, saved, first);
    undo(dh);
  } else {
    linear_input_gradient(context, down, dy, dh);
    undo(dh);
    linear_backward(context, down, batch, {dh, dy}, saved, first);
  }
}

}  // namespace lm
