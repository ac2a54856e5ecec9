#include "model/transformer.h"

namespace lm {

BlockSaved allocate_block_saved(const Context& context, const TransformerBlock& block, int64_t rows) {
  BlockSaved saved;
  saved.sublayers.reserve(block.sublayers.size());
  for (const Sublayer& sublayer : block.sublayers) {
    BlockSaved::Sublayer& out = saved.sublayers.emplace_back();
    if (saved.sublayers.size() > 1) out.x = context.tensor(rows, context.spec.hidden);
    out.rstd = context.tensor(rows, 1, DType::kF32);
    out.mixer = std::visit([&](const auto& mixer) { return MixerSaved(mixer.allocate(context, rows)); },
                           sublayer.mixer);
  }
  return saved;
}

void block_forward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                   const View& x_in, BlockSaved& saved, const View& x_out) {
  const ArenaFrame frame(context.arena);
  const View normed = context.tensor(batch.rows, context.spec.hidden);
  View x = x_in, y;
  for (size_t s = 0; s < block.sublayers.size(); ++s) {
    const Sublayer& sublayer = block.sublayers[s];
    BlockSaved::Sublayer& kept = saved.sublayers[s];
    // The next sublayer's norm adds this one's output to the residual stream; the last one's last product
    // does.
    MixerOutput output;
    if (s + 1 == block.sublayers.size())
      output.kind = x_out.defined() ? MixerOutput::Kind::kAdded : MixerOutput::Kind::kNone;
    if (s == 0) {
      norm_forward(context, sublayer.norm, x, normed, kept.rstd);
    } else {
      norm_forward_residual(context, sublayer.norm,
                            {.x = y, .residual = x, .sum = kept.x, .out = normed, .rstd = kept.rstd});
      x = kept.x;
    }
    output.residual = x, output.sum = x_out;
    std::visit(
        [&](const auto& mixer) {
          using Saved = typename std::decay_t<decltype(mixer)>::Saved;
          y = mixer.forward(context, batch, normed, std::get<Saved>(kept.mixer), output);
        },
        sublayer.mixer);
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
    MixerInput input(context, sublayer.norm, x, s > 0 || want_dx || sublayer.norm.weight.gradient.defined());
    std::visit(
        [&, &dx = dx, first = first](const auto& mixer) {
          using Saved = typename std::decay_t<decltype(mixer)>::Saved;
          mixer.backward(context, batch, input, std::get<Saved>(kept.mixer), dx, first);
        },
        sublayer.mixer);
    if (!input.gradient().defined()) continue;
    norm_backward(context, sublayer.norm,
                  {.dy = input.gradient(), .x = x, .rstd = kept.rstd, .dresidual = dx, .dx = dx}, first);
  }
}

}  // namespace lm
