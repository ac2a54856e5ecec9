#include "model/mixers/layer_input.h"

#include "model/carried.h"
#include "model/mixers/activated.h"

namespace lm {
namespace {

// The layer's columns of what all layers have.
View columns_of(const LayerInput& mixer, const View& all) {
  return all.column_range(mixer.layer * mixer.spec.width, mixer.spec.width);
}

View gate_of(const LayerInput& mixer, const View& both) {
  return both.column_range(0, mixer.spec.width);
}
View input_of(const LayerInput& mixer, const View& both) {
  return both.column_range(mixer.spec.width, mixer.spec.width);
}

}  // namespace

LayerInput::Saved LayerInput::allocate(const Context& context, int64_t rows) const {
  Saved saved;
  saved.gate_and_input = context.tensor(rows, 2 * spec.width);
  saved.gate_adapters = allocate_saved(context, gate, rows);
  saved.out_adapters = allocate_saved(context, out, rows);
  return saved;
}

View LayerInput::forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
                         const MixerOutput& output) const {
  LM_CHECK(batch.carried != nullptr, "a layer's input comes from the embedding stage");
  linear_forward(context, gate, batch, {x, gate_of(*this, saved.gate_and_input)}, saved.gate_adapters);
  context.kernels.copy_rows(
      {.from = columns_of(*this, batch.carried->inputs), .to = input_of(*this, saved.gate_and_input)},
      context.stream);
  const View h = context.tensor(x.rows, spec.width);
  gated_forward(context, spec.activation, saved.gate_and_input, h);
  return project_output(context, out, batch, h, saved.out_adapters, output);
}

void LayerInput::backward(const Context& context, const DeviceBatch& batch, MixerInput& input,
                          const Saved& saved, const View& dy, bool first) const {
  activated_backward(
      context, out, batch, {dy, saved.out_adapters, first},
      [&](const View& h) { gated_forward(context, spec.activation, saved.gate_and_input, h); },
      [&](const View& dh) { gated_backward(context, spec.activation, saved.gate_and_input, dh); });
  if (batch.carried->input_gradient.defined()) {
    context.kernels.copy_rows({.from = input_of(*this, saved.gate_and_input),
                               .to = columns_of(*this, batch.carried->input_gradient)},
                              context.stream);
  }
  const View normed = input.normed();
  linear_backward(context, gate, batch, {normed, gate_of(*this, saved.gate_and_input), input.gradient()},
                  saved.gate_adapters, first);
}

}  // namespace lm
