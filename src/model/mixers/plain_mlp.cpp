#include "model/mixers/plain_mlp.h"

#include "model/mixers/activated.h"

namespace lm {
namespace {

// h [T, F] of what the first projection made.
void activate(const Context& context, Activation activation, const View& up, const View& h) {
  context.kernels.activation_forward({.x = up.data,
                                      .out = h.data,
                                      .elements = h.elements(),
                                      .activation = activation,
                                      .dtype = context.dtype},
                                     context.stream);
}

}  // namespace

PlainMlp::Saved PlainMlp::allocate(const Context& context, int64_t rows) const {
  Saved saved;
  saved.up = context.tensor(rows, spec.ffn);
  saved.up_adapters = allocate_saved(context, up, rows);
  saved.down_adapters = allocate_saved(context, down, rows);
  return saved;
}

View PlainMlp::forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
                       const MixerOutput& output) const {
  linear_forward(context, up, batch, {x, saved.up}, saved.up_adapters);
  if (output.kind == MixerOutput::Kind::kNone && !down.adapted()) return {};
  const View h = context.tensor(x.rows, spec.ffn);
  activate(context, spec.activation, saved.up, h);
  return project_output(context, down, batch, h, saved.down_adapters, output);
}

void PlainMlp::backward(const Context& context, const DeviceBatch& batch, MixerInput& input,
                        const Saved& saved, const View& dy, bool first) const {
  activated_backward(
      context, down, batch, {dy, saved.down_adapters, first},
      [&](const View& h) { activate(context, spec.activation, saved.up, h); },
      [&](const View& dh) {
        context.kernels.activation_backward({.x = saved.up.data,
                                             .dh = dh.data,
                                             .elements = dh.elements(),
                                             .activation = spec.activation,
                                             .dtype = context.dtype},
                                            context.stream);
      });
  const View normed = input.normed();
  linear_backward(context, up, batch, {normed, saved.up, input.gradient()}, saved.up_adapters, first);
}

}  // namespace lm
