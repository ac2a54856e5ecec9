#include "model/mixers/shared_expert.h"

#include "model/mixers/activated.h"

namespace lm {
namespace {

// h = activation(gate x) * up x, of a gated expert times the token's factor.
void activate(const Context& context, const SharedExpert& mixer, const SharedExpert::Saved& saved,
              const View& h) {
  gated_forward(context, mixer.spec.activation, saved.gate_up, h);
  if (mixer.spec.gated) context.kernels.gate_rows({.gate = saved.weight, .x = h}, context.stream);
}

// From dh, the gradient of what `down` reads, to those of `gate_up`'s output and of the factor's logit; what
// `down` has read takes dh's place.
void undo(const Context& context, const SharedExpert& mixer, const SharedExpert::Saved& saved, const View& dh,
          const View& dweight) {
  const ArenaFrame frame(context.arena);
  if (mixer.spec.gated) {
    const View h = context.like(dh);
    gated_forward(context, mixer.spec.activation, saved.gate_up, h);
    context.kernels.gate_rows({.gate = saved.weight, .x = dh, .other = h, .dgate = dweight}, context.stream);
  }
  gated_backward(context, mixer.spec.activation, saved.gate_up, dh);
  if (mixer.spec.gated) context.kernels.gate_rows({.gate = saved.weight, .x = dh}, context.stream);
}

}  // namespace

SharedExpert::Saved SharedExpert::allocate(const Context& context, int64_t rows) const {
  Saved saved;
  saved.gate_up = context.tensor(rows, 2 * spec.ffn);
  if (spec.gated) saved.weight = context.tensor(rows, 1);
  saved.gate_up_adapters = allocate_saved(context, gate_up, rows);
  saved.down_adapters = allocate_saved(context, down, rows);
  return saved;
}

View SharedExpert::forward(const Context& context, const DeviceBatch& batch, const View& x, Saved& saved,
                           const MixerOutput& output) const {
  LinearSaved none;
  if (spec.gated) linear_forward(context, weight, batch, {.x = x, .y = saved.weight}, none);
  linear_forward(context, gate_up, batch, {x, saved.gate_up}, saved.gate_up_adapters);
  if (output.kind == MixerOutput::Kind::kNone && !down.adapted()) return {};
  const View h = context.tensor(x.rows, spec.ffn);
  activate(context, *this, saved, h);
  return project_output(context, down, batch, h, saved.down_adapters, output);
}

void SharedExpert::backward(const Context& context, const DeviceBatch& batch, MixerInput& input,
                            const Saved& saved, const View& dy, bool first) const {
  const View dweight = spec.gated ? context.tensor(dy.rows, 1) : View();
  activated_backward(
      context, down, batch, {dy, saved.down_adapters, first},
      [&](const View& h) { activate(context, *this, saved, h); },
      [&](const View& dh) { undo(context, *this, saved, dh, dweight); });
  const View normed = input.normed(), dx = input.gradient();
  linear_backward(context, gate_up, batch, {normed, saved.gate_up, dx}, saved.gate_up_adapters, first);
  if (!spec.gated) return;
  linear_backward(context, weight, batch, {.x = normed, .dy = dweight}, {}, first);
  if (dx.defined()) linear_input_gradient(context, weight, dweight, dx, dx);
}

}  // namespace lm
