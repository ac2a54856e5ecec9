#include "model/transformer.h"

namespace lm {
namespace {

bool has(const Norm& norm) {
  return norm.weight.weight.defined();
}

// to [T, H] += x.
void add_to(const Context& context, const View& x, const View& to) {
  context.kernels.accumulate(
      {.to = to.data, .from = x.data, .elements = x.elements(), .to_dtype = to.dtype, .from_dtype = x.dtype},
      context.stream);
}

// sum = residual + scale * norm_after(output), where one of these is between the output and the residual
// stream. With an undefined sum only what the norm saves is computed.
void add_output(const Context& context, const Sublayer& sublayer, const View& output,
                const BlockSaved::Sublayer& kept, const View& residual, const View& sum) {
  const ArenaFrame frame(context.arena);
  View added = output;
  if (has(sublayer.norm_after)) {
    added = context.like(output);
    norm_forward(context, sublayer.norm_after, output, added, kept.rstd_after);
  }
  if (!sum.defined()) return;
  if (sublayer.residual_scale != 1)
    context.kernels.scale({.x = added, .out = added, .factor = sublayer.residual_scale}, context.stream);
  context.kernels.copy_rows({.from = residual, .to = sum}, context.stream);
  add_to(context, added, sum);
}

// The gradient of the mixer's output, from that of the residual stream behind it: dx itself where nothing is
// between.
View output_gradient(const Context& context, const Sublayer& sublayer, const BlockSaved::Sublayer& kept,
                     const View& dx, bool first) {
  if (sublayer.adds_output()) return dx;
  const View dy = context.like(dx);
  context.kernels.scale({.x = dx, .out = dy, .factor = sublayer.residual_scale}, context.stream);
  if (has(sublayer.norm_after))
    norm_backward(context, sublayer.norm_after,
                  {.dy = dy, .x = kept.output, .rstd = kept.rstd_after, .dx = dy}, first);
  return dy;
}

}  // namespace

BlockSaved allocate_block_saved(const Context& context, const TransformerBlock& block, int64_t rows) {
  const int64_t hidden = context.spec.hidden;
  BlockSaved saved;
  saved.sublayers.reserve(block.sublayers.size());
  for (const Sublayer& sublayer : block.sublayers) {
    BlockSaved::Sublayer& out = saved.sublayers.emplace_back();
    if (saved.sublayers.size() > 1) out.x = context.tensor(rows, hidden);
    if (has(sublayer.norm)) out.rstd = context.tensor(rows, 1, DType::kF32);
    if (has(sublayer.norm_after)) {
      out.output = context.tensor(rows, hidden);
      out.rstd_after = context.tensor(rows, 1, DType::kF32);
    }
    out.mixer = std::visit([&](const auto& mixer) { return MixerSaved(mixer.allocate(context, rows)); },
                           sublayer.mixer);
  }
  return saved;
}

void block_forward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                   const View& x_in, BlockSaved& saved, const View& x_out) {
  const ArenaFrame frame(context.arena);
  const View normed = context.tensor(batch.rows, context.spec.hidden);
  View x = x_in, y;  // y: an output that has not been added yet
  for (size_t s = 0; s < block.sublayers.size(); ++s) {
    const Sublayer& sublayer = block.sublayers[s];
    BlockSaved::Sublayer& kept = saved.sublayers[s];
    const bool last = s + 1 == block.sublayers.size();
    if (y.defined() && has(sublayer.norm)) {  // the norm adds it
      norm_forward_residual(context, sublayer.norm,
                            {.x = y, .residual = x, .sum = kept.x, .out = normed, .rstd = kept.rstd});
      x = kept.x;
    } else {
      if (y.defined()) {
        context.kernels.copy_rows({.from = x, .to = kept.x}, context.stream);
        add_to(context, y, kept.x);
      }
      if (s > 0) x = kept.x;
      if (has(sublayer.norm)) norm_forward(context, sublayer.norm, x, normed, kept.rstd);
    }
    // The last sublayer's last product adds its output to the residual stream, the next one's norm that of
    // another.
    MixerOutput output{.kind = MixerOutput::Kind::kAlone, .residual = x, .sum = x_out};
    if (has(sublayer.norm_after)) {
      output = {.kind = MixerOutput::Kind::kAdded, .residual = {}, .sum = kept.output};
    } else if (last && !x_out.defined()) {
      output.kind = MixerOutput::Kind::kNone;
    } else if (last && sublayer.adds_output()) {
      output.kind = MixerOutput::Kind::kAdded;
    }
    std::visit(
        [&](const auto& mixer) {
          using Saved = typename std::decay_t<decltype(mixer)>::Saved;
          y = mixer.forward(context, batch, has(sublayer.norm) ? normed : x, std::get<Saved>(kept.mixer),
                            output);
        },
        sublayer.mixer);
    if (sublayer.adds_output()) continue;
    const View sum = last ? x_out : saved.sublayers[s + 1].x;
    add_output(context, sublayer, y, kept, x, sum);
    y = {};
  }
}

void block_backward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                    const View& x_in, const BlockSaved& saved, const BlockGradient& gradient) {
  const auto& [dx, first, want_dx] = gradient;
  for (size_t s = block.sublayers.size(); s-- > 0;) {
    const Sublayer& sublayer = block.sublayers[s];
    const BlockSaved::Sublayer& kept = saved.sublayers[s];
    const View& x = s == 0 ? x_in : kept.x;
    const ArenaFrame frame(context.arena);
    const View dy = output_gradient(context, sublayer, kept, dx, first);
    MixerInput input(context, sublayer.norm, x, s > 0 || want_dx || sublayer.norm.weight.gradient.defined());
    std::visit(
        [&, first = first](const auto& mixer) {
          using Saved = typename std::decay_t<decltype(mixer)>::Saved;
          mixer.backward(context, batch, input, std::get<Saved>(kept.mixer), dy, first);
        },
        sublayer.mixer);
    const View& dinput = input.gradient();
    if (!dinput.defined()) continue;
    if (!has(sublayer.norm)) {
      add_to(context, dinput, dx);
      continue;
    }
    norm_backward(context, sublayer.norm,
                  {.dy = dinput, .x = x, .rstd = kept.rstd, .dresidual = dx, .dx = dx}, first);
  }
}

}  // namespace lm
