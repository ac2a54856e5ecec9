#include "model/mixers/gated_mlp.h"

#include "model/mixers/activated.h"

namespace lm {

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
  if (output.kind == MixerOutput::Kind::kNone && !down.adapted()) return {};
  const View h = context.tensor(x.rows, spec.ffn);
  gated_forward(context, spec.activation, saved.gate_up, h);
  return project_output(context, down, batch, h, saved.down_adapters, output);
}

void GatedMlp::backward(const Context& context, const DeviceBatch& batch, MixerInput& input,
                        const Saved& saved, const View& dy, bool first) const {
  activated_backward(
      context, down, batch, {dy, saved.down_adapters, first},
      [&](const View& h) { gated_forward(context, spec.activation, saved.gate_up, h); },
      [&](const View& dh) { gated_backward(context, spec.activation, saved.gate_up, dh); });
  const View normed = input.normed();
  linear_backward(context, gate_up, batch, {normed, saved.gate_up, input.gradient()}, saved.gate_up_adapters,
                  first);
}

}  // namespace lm
