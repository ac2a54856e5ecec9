#include "model/mixers/gated_mlp.h"

namespace lm {
namespace {

// h [T, F] of what the first projection made.
void activate(const Context& context, Activation activation, const View& gate_up, const View& h) {
  switch (activation) {
    case Activation::kSilu:
      context.kernels.swiglu_forward(
          {.gate_up = gate_up.data, .out = h.data, .rows = h.rows, .ffn = h.columns, .dtype = context.dtype},
          context.stream);
      return;
  }
}

// dh becomes h, gate_up its own gradient.
void activate_backward(const Context& context, Activation activation, const View& gate_up, const View& dh) {
  switch (activation) {
    case Activation::kSilu:
      context.kernels.swiglu_backward({.gate_up = gate_up.data,
                                       .dh = dh.data,
                                       .rows = dh.rows,
                                       .ffn = dh.columns,
                                       .dtype = context.dtype},
                                      context.stream);
      return;
  }
}

}  // namespace

GatedMlp::Saved GatedMlp::allocate(const Context& context, int64_t rows) const {
  Saved saved;
  saved.gate_up = context.tensor(rows, 2 * spec.ffn);
  saved.gate_up_adapters = allocate_saved(context, gate_up, rows);
  saved.down_adapters = allocate_saved(context, down, rows);
  return saved;
}

View GatedMlp::forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
                       const MixerOutput& output) const {
  linear_forward(context, gate_up, batch, {x, saved.gate_up}, saved.gate_up_adapters);
  if (output.kind == MixerOutput::Kind::kNone && down.adapters.empty()) return {};
  const View h = context.tensor(x.rows, spec.ffn);
  activate(context, spec.activation, saved.gate_up, h);
  return project_output(context, down, batch, h, saved.down_adapters, output);
}

void GatedMlp::backward(const Context& context, const DeviceBatch& batch, MixerInput& input,
                        const Saved& saved, const View& dy, bool first) const {
  // The adapter's backward wants h beside dh: h is computed once more, since the fused kernel below makes it
  // only when dh is complete.
  const bool adapted = !down.adapters.empty();
  View h;
  if (adapted) {
    h = context.tensor(batch.rows, spec.ffn);
    activate(context, spec.activation, saved.gate_up, h);
  }
  const View dh = context.tensor(batch.rows, spec.ffn);
  if (adapted) {
    linear_backward(context, down, batch, {h, dy, dh}, saved.down_adapters, first);
    activate_backward(context, spec.activation, saved.gate_up, dh);
  } else {
    linear_input_gradient(context, down, dy, dh);
    activate_backward(context, spec.activation, saved.gate_up, dh);
    linear_backward(context, down, batch, {dh, dy}, saved.down_adapters, first);
  }
  const View normed = input.normed();
  linear_backward(context, gate_up, batch, {normed, saved.gate_up, input.gradient()}, saved.gate_up_adapters,
                  first);
}

}  // namespace lm
