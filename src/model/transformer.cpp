#include "model/transformer.h"

#include <algorithm>

namespace lm {
namespace {

// x [T, H] *= the block's scalar, forward and backward.
void apply_scalar(const Context& context, const TransformerBlock& block, const View& x) {
  if (!block.scalar.defined()) return;
  context.kernels.scale({.x = x, .out = x, .device_factor = block.scalar.data}, context.stream);
}

// Sublayers beside each other are a group: the first of them has the norm, and [first, end) read its output;
// or it has norm_joined, and each has a norm of its own.
size_t group_first(const TransformerBlock& block, size_t s) {
  while (block.sublayers[s].beside) --s;
  return s;
}
size_t group_end(const TransformerBlock& block, size_t s) {
  do {
    ++s;
  } while (s < block.sublayers.size() && block.sublayers[s].beside);
  return s;
}

struct Group {
  size_t begin = 0, end = 0;
  View x = {};  // what it reads
};

// x becomes the sublayer's input, and `normed` the norm of it where there is one. `y`: the output of the
// sublayer before, which has not been added yet; undefined: kept.x has the input already, or it is the
// block's.
void read_stream(const Context& context, const Sublayer& sublayer, const BlockSaved::Sublayer& kept,
                 const View& y, const View& normed, View& x) {
  if (y.defined() && sublayer.norm) {  // the norm adds it
    norm_forward_residual(context, *sublayer.norm,
                          {.x = y, .residual = x, .sum = kept.x, .out = normed, .rstd = kept.rstd});
    x = kept.x;
    return;
  }
  if (y.defined()) {
    context.kernels.copy_rows({.from = x, .to = kept.x}, context.stream);
    accumulate(context, kept.x, y);
  }
  if (kept.x.defined()) x = kept.x;
  if (sublayer.norm) norm_forward(context, *sublayer.norm, x, normed, kept.rstd);
}

// sum = residual + scale * norm_after(drop(output)), where one of these is between the output and the
// residual stream; `residual` may be `sum`. With an undefined sum only what the norm saves is computed.
struct AddedOutput {
  View output, residual, sum;
};
void add_output(const Context& context, const Sublayer& sublayer, const DeviceBatch& batch,
                const BlockSaved::Sublayer& kept, const AddedOutput& pass) {
  const auto& [output, residual, sum] = pass;
  if (sublayer.norm_after) {
    if (sublayer.dropout.on()) drop(context, sublayer.dropout, batch, output, output);
    return norm_forward_added(context, *sublayer.norm_after,
                              {.x = output,
                               .residual = residual,
                               .sum = sum,
                               .rstd = kept.rstd_after,
                               .factor = sublayer.residual_scale});
  }
  if (!sum.defined()) return;
  if (sublayer.residual_scale != 1)
    context.kernels.scale({.x = output, .out = output, .factor = sublayer.residual_scale}, context.stream);
  if (residual.data != sum.data) context.kernels.copy_rows({.from = residual, .to = sum}, context.stream);
  if (sublayer.dropout.on()) return add_dropped(context, sublayer.dropout, batch, output, sum);
  accumulate(context, sum, output);
}

// The gradient of the mixer's output, from that of the residual stream behind it: dx itself where nothing is
// between.
View output_gradient(const Context& context, const Sublayer& sublayer, const DeviceBatch& batch,
                     const BlockSaved::Sublayer& kept, const View& dx, bool first) {
  if (sublayer.adds_output()) return dx;
  const View dy = context.like(dx);
  View from = dx;
  const bool scaled = sublayer.residual_scale != 1;
  if (scaled) context.kernels.scale({.x = dx, .out = dy, .factor = sublayer.residual_scale}, context.stream);
  if (scaled) from = dy;
  if (sublayer.norm_after) {
    norm_backward(context, *sublayer.norm_after,
                  {.dy = from, .x = kept.output, .rstd = kept.rstd_after, .dx = dy}, first);
    from = dy;
  }
  if (sublayer.dropout.on()) drop(context, sublayer.dropout, batch, from, dy);
  return dy;
}

// The sum of what norm_after gives of a group's outputs, in the arena. The outputs are there; backward
// computes it once more.
View join_outputs(const Context& context, const TransformerBlock& block, const BlockSaved& saved,
                  const Group& group) {
  View sum;
  for (size_t s = group.begin; s < group.end; ++s) {
    const BlockSaved::Sublayer& kept = saved.sublayers[s];
    const Norm& norm = *block.sublayers[s].norm_after;
    if (s > group.begin) {
      norm_forward_added(context, norm,
                         {.x = kept.output, .residual = sum, .sum = sum, .rstd = kept.rstd_after});
      continue;
    }
    sum = context.like(kept.output);
    norm_forward(context, norm, kept.output, sum, kept.rstd_after);
  }
  return sum;
}

// sum = residual + norm_joined(the sum of the group's outputs); without `sum` what their norms save alone.
void add_joined(const Context& context, const TransformerBlock& block, const BlockSaved& saved,
                const Group& group, const AddedOutput& pass) {
  const ArenaFrame frame(context.arena);
  const View joined = join_outputs(context, block, saved, group);
  if (!pass.sum.defined()) return;
  norm_forward_added(context, *block.sublayers[group.begin].norm_joined,
                     {.x = joined, .residual = pass.residual, .sum = pass.sum, .rstd = {}});
}

// From the gradient of the residual stream behind a group to that of the sum of its outputs, in the arena.
View joined_gradient(const Context& context, const TransformerBlock& block, const BlockSaved& saved,
                     const Group& group, const BlockGradient& gradient) {
  const View out = context.like(gradient.dx);
  const ArenaFrame frame(context.arena);
  const Norm& norm = *block.sublayers[group.begin].norm_joined;
  const View joined = join_outputs(context, block, saved, group);
  const View rstd = context.tensor(joined.rows, 1, DType::kF32);
  norm_forward_added(context, norm, {.x = joined, .residual = {}, .sum = {}, .rstd = rstd});
  norm_backward(context, norm, {.dy = gradient.dx, .x = joined, .rstd = rstd, .dx = out}, gradient.first);
  return out;
}

// Whether what the mixer saves, and its output where a norm reads that, stays until backward.
bool keeps_mixer(const Sublayer& sublayer, Recompute level) {
  if (level != Recompute::kAttention) return level == Recompute::kNone;
  return std::visit([](const auto& mixer) { return std::decay_t<decltype(mixer)>::kKeptWithAttention; },
                    sublayer.mixer);
}

// What a mixer saves of `input` [T, H], once more.
void recompute_mixer(const Context& context, const Sublayer& sublayer, const DeviceBatch& batch,
                     const View& input, BlockSaved::Sublayer& kept) {
  MixerOutput output{.kind = MixerOutput::Kind::kNone};
  if (sublayer.norm_after) output = {.kind = MixerOutput::Kind::kAdded, .residual = {}, .sum = kept.output};
  const View y = std::visit(
      [&](const auto& mixer) {
        using Saved = typename std::decay_t<decltype(mixer)>::Saved;
        return mixer.forward(context, batch, input, std::get<Saved>(kept.mixer), output);
      },
      sublayer.mixer);
  if (sublayer.norm_after) add_output(context, sublayer, batch, kept, {y, input, {}});
}

// From dx to the gradients of the sublayer's parameters, but its norm's, and of its input.
void mixer_backward(const Context& context, const Sublayer& sublayer, const DeviceBatch& batch,
                    const BlockSaved::Sublayer& kept, const BlockGradient& gradient, MixerInput& input) {
  const View dy = output_gradient(context, sublayer, batch, kept, gradient.dx, gradient.first);
  std::visit(
      [&](const auto& mixer) {
        using Saved = typename std::decay_t<decltype(mixer)>::Saved;
        mixer.backward(context, batch, input, std::get<Saved>(kept.mixer), dy, gradient.first);
      },
      sublayer.mixer);
}

// From the gradient of what a sublayer's norm gives, or of the residual stream, to that of the stream: added.
void add_to_stream(const Context& context, const Sublayer& sublayer, const BlockSaved::Sublayer& kept,
                   const View& x, const View& dinput, const BlockGradient& gradient) {
  const View& dx = gradient.dx;
  if (!sublayer.norm) return accumulate(context, dx, dinput);
  norm_backward(context, *sublayer.norm, {.dy = dinput, .x = x, .rstd = kept.rstd, .dresidual = dx, .dx = dx},
                gradient.first);
}

bool trained(const Norm& norm) {
  return norm.weight.gradient.defined() || norm.bias.gradient.defined();
}
bool trained(const std::optional<Norm>& norm) {
  return norm && trained(*norm);
}
bool trained(const Linear& linear) {
  return linear.weight.gradient.defined() || linear.bias.gradient.defined() || !linear.biases.empty() ||
         linear.adapted();
}
bool trained(const Prefix& prefix) {
  return prefix.rows.gradient.defined();
}
bool trained(const Sinks& sinks) {
  return sinks.logits.gradient.defined();
}
bool trained(const Buffer& /*buffer*/) {
  return false;
}
bool trained(const Factors& factors) {
  return factors.values.gradient.defined();
}
bool trained(const Sublayer& sublayer) {
  bool out = trained(sublayer.norm) || trained(sublayer.norm_after) || trained(sublayer.norm_joined);
  const auto look = [&](const char* /*name*/, const auto& part) { out = out || trained(part); };
  std::visit([&](const auto& mixer) { mixer.visit(mixer, look); }, sublayer.mixer);
  return out;
}
// Of the first `end` sublayers.
bool any_trained(const TransformerBlock& block, size_t end) {
  return std::any_of(block.sublayers.begin(), block.sublayers.begin() + static_cast<std::ptrdiff_t>(end),
                     [](const Sublayer& sublayer) { return trained(sublayer); });
}

// Of a group with norm_joined.
void joined_backward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                     const BlockSaved& saved, const Group& group, const BlockGradient& gradient) {
  BlockGradient of_outputs = gradient;
  of_outputs.dx = joined_gradient(context, block, saved, group, gradient);
  for (size_t s = group.end; s-- > group.begin;) {
    const ArenaFrame frame(context.arena);
    const Sublayer& sublayer = block.sublayers[s];
    const BlockSaved::Sublayer& kept = saved.sublayers[s];
    const bool wanted = gradient.want_dx || trained(sublayer.norm) || any_trained(block, group.begin);
    MixerInput input(context, {sublayer.norm, group.x, kept.normed}, wanted);
    mixer_backward(context, sublayer, batch, kept, of_outputs, input);
    if (const View& dinput = input.gradient(); dinput.defined())
      add_to_stream(context, sublayer, kept, group.x, dinput, gradient);
  }
}

}  // namespace

void allocate_block_saved(const Context& context, const TransformerBlock& block, int64_t rows,
                          Recompute level, SavedPart part, BlockSaved& saved) {
  const int64_t hidden = context.spec.hidden;
  const bool kept = part == SavedPart::kKept;
  saved.sublayers.resize(block.sublayers.size());
  for (size_t s = 0; s < block.sublayers.size(); ++s) {
    const Sublayer& sublayer = block.sublayers[s];
    BlockSaved::Sublayer& out = saved.sublayers[s];
    if ((level != Recompute::kBlock) == kept) {
      if (s > 0 && !sublayer.beside) out.x = context.tensor(rows, hidden);
      if (sublayer.norm) out.rstd = context.tensor(rows, 1, DType::kF32);
    }
    if (sublayer.norm && saved.keep_norms && kept && level == Recompute::kNone)
      out.normed = context.tensor(rows, hidden);
    if (keeps_mixer(sublayer, level) != kept) continue;
    if (sublayer.norm_after) {
      out.output = context.tensor(rows, hidden);
      out.rstd_after = context.tensor(rows, 1, DType::kF32);
    }
    out.mixer = std::visit(
        [&](const auto& mixer) {
          using Saved = typename std::decay_t<decltype(mixer)>::Saved;
          Saved made = mixer.allocate(context, rows);
          // Of the same tokens: their experts may be there since forward.
          if constexpr (requires { made.brought; }) {
            if (const auto* const before = std::get_if<Saved>(&out.mixer)) made.brought = before->brought;
          }
          return MixerSaved(std::move(made));
        },
        sublayer.mixer);
  }
}

BlockSaved allocate_block_saved(const Context& context, const TransformerBlock& block, int64_t rows) {
  BlockSaved saved;
  allocate_block_saved(context, block, rows, Recompute::kNone, SavedPart::kKept, saved);
  return saved;
}

void block_forward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                   const View& x_in, BlockSaved& saved, const View& x_out) {
  const ArenaFrame frame(context.arena);
  View shared;  // by all norms whose output is not kept
  // The norm's output of `sublayer`, or memory for it; x where it has none.
  const auto input_of = [&](const Sublayer& sublayer, const BlockSaved::Sublayer& kept, const View& x) {
    if (!sublayer.norm || kept.normed.defined()) return sublayer.norm ? kept.normed : x;
    if (!shared.defined()) shared = context.tensor(batch.rows, context.spec.hidden);
    return shared;
  };
  // x: what a group reads. stream: the same, and behind its first sublayer the sum with outputs so far. y: an
  // output that has not been added yet.
  View x = x_in, stream, y, input;
  for (size_t s = 0; s < block.sublayers.size(); ++s) {
    const Sublayer& sublayer = block.sublayers[s];
    BlockSaved::Sublayer& kept = saved.sublayers[s];
    const size_t begin = group_first(block, s), end = group_end(block, s);
    const std::optional<Norm>& joined = block.sublayers[begin].norm_joined;
    if (!sublayer.beside) {
      input = input_of(sublayer, kept, x);
      read_stream(context, sublayer, kept, y, input, x);
      if (!sublayer.norm) input = x;
      stream = x;
    } else if (joined) {
      input = input_of(sublayer, kept, x);
      if (sublayer.norm) norm_forward(context, *sublayer.norm, x, input, kept.rstd);
    }
    const bool last = end == block.sublayers.size(), several = end > begin + 1;
    const View sum = last ? x_out : saved.sublayers[end].x;
    // The last product of the last sublayer, and of those beside each other, adds the output to the residual
    // stream; the next one's norm adds that of another.
    MixerOutput output{.kind = MixerOutput::Kind::kAlone, .residual = stream, .sum = sum};
    if (sublayer.norm_after) {
      output = {.kind = MixerOutput::Kind::kAdded, .residual = {}, .sum = kept.output};
    } else if (!sum.defined()) {
      output.kind = MixerOutput::Kind::kNone;
    } else if ((last || several) && sublayer.adds_output()) {
      output.kind = MixerOutput::Kind::kAdded;
    }
    std::visit(
        [&](const auto& mixer) {
          using Saved = typename std::decay_t<decltype(mixer)>::Saved;
          y = mixer.forward(context, batch, input, std::get<Saved>(kept.mixer), output);
        },
        sublayer.mixer);
    if (joined) {
      if (s + 1 == end) add_joined(context, block, saved, {begin, end}, {{}, x, sum});
    } else if (!sublayer.adds_output()) {
      add_output(context, sublayer, batch, kept, {y, stream, sum});
    }
    if (output.kind != MixerOutput::Kind::kAlone || !sublayer.adds_output()) y = {};
    stream = sum;
  }
  if (x_out.defined()) apply_scalar(context, block, x_out);
}

void block_recompute(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                     const View& x_in, Recompute level, BlockSaved& saved) {
  if (level == Recompute::kBlock) return block_forward(context, block, batch, x_in, saved, {});
  for (size_t begin = 0, end = 0; begin < block.sublayers.size(); begin = end) {
    end = group_end(block, begin);
    const ArenaFrame frame(context.arena);
    const bool joined = block.sublayers[begin].norm_joined.has_value();
    const View& x = begin == 0 ? x_in : saved.sublayers[begin].x;
    View input;
    for (size_t s = begin; s < end; ++s) {
      if (keeps_mixer(block.sublayers[s], level)) continue;
      if (!input.defined() || joined) {
        const std::optional<Norm>& norm = block.sublayers[joined ? s : begin].norm;
        input = norm ? context.like(x) : x;
        if (norm) norm_forward(context, *norm, x, input, {});
      }
      recompute_mixer(context, block.sublayers[s], batch, input, saved.sublayers[s]);
    }
  }
}

void block_backward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                    const View& x_in, const BlockSaved& saved, const BlockGradient& gradient) {
  const auto& [dx, first, want_dx] = gradient;
  apply_scalar(context, block, dx);
  for (size_t end = block.sublayers.size(), begin = 0; end > 0; end = begin) {
    if (!want_dx && !any_trained(block, end)) return;
    begin = group_first(block, end - 1);
    const std::optional<Norm>& norm = block.sublayers[begin].norm;
    const BlockSaved::Sublayer& kept = saved.sublayers[begin];
    const View& x = begin == 0 ? x_in : kept.x;
    const ArenaFrame frame(context.arena);
    if (block.sublayers[begin].norm_joined) {
      joined_backward(context, block, batch, saved, {begin, end, x}, gradient);
      continue;
    }
    const bool wanted = want_dx || trained(norm) || any_trained(block, begin);
    // What the sublayers beside the first one give the shared input is complete before that one begins.
    View others;
    if (wanted && end - begin > 1) others = context.like(x);
    for (size_t s = end - 1; s > begin; --s) {
      const ArenaFrame beside(context.arena);
      MixerInput input(context, {norm, x, kept.normed}, wanted, s + 1 == end ? others : View());
      mixer_backward(context, block.sublayers[s], batch, saved.sublayers[s], gradient, input);
      if (wanted && s + 1 < end) accumulate(context, others, input.gradient());
    }
    MixerInput input(context, {norm, x, kept.normed}, wanted);
    mixer_backward(context, block.sublayers[begin], batch, kept, gradient, input);
    const View& dinput = input.gradient();
    if (!dinput.defined()) continue;
    if (others.defined()) accumulate(context, dinput, others);
    add_to_stream(context, block.sublayers[begin], kept, x, dinput, gradient);
  }
}

}  // namespace lm
