// One transformer block with its explicit forward and backward: a list of sublayers, each of them
//   x = x + scale * norm_after(drop(mixer(norm(x))))
// or several beside each other, which read the same norm(x), or with a norm of their sum
//   x = x + norm_joined(sum of norm_after(mixer(norm(x)))),
// in which each has norms of its own. Families differ in what the spec says of them,
// never in this code's shape. Saved activations and temporaries live in the arena; parameters are views into
// the block's arrays.
#pragma once

#include <optional>
#include <vector>

#include "config/config.h"
#include "model/mixers/table.h"

namespace lm {

struct Sublayer {
  std::optional<Norm> norm, norm_after, norm_joined;  // [H]; unset where there is none
  float residual_scale = 1;
  bool beside = false;       // it reads what the sublayer before it reads
  DropoutMask dropout = {};  // of the mixer's output, while training
  Mixer mixer;
  // Nothing stands between the mixer's output and the residual stream.
  bool adds_output() const { return !norm_after && residual_scale == 1 && !dropout.on(); }
};

struct TransformerBlock {
  std::vector<Sublayer> sublayers;
  View scalar;  // [1], of the model's type: multiplies the block's output; undefined: 1
};

// What backward needs of a block's forward, in arena order. The first sublayer's x, the block's input,
// belongs to the caller.
struct BlockSaved {
  struct Sublayer {
    View x;                   // [T, H], the sublayer's input; undefined: the block's, or it is beside another
    View rstd;                // [T] fp32, where a norm is before the mixer
    View normed;              // [T, H] that this norm gives, if it is kept
    View output, rstd_after;  // [T, H] that the norm after the mixer reads and [T] fp32; else undefined
    MixerSaved mixer;
  };
  std::vector<Sublayer> sublayers;
  bool keep_norms = false;  // StepConfig's
};

// A level of recomputation keeps one part of it from forward to backward; backward begins with the other.
enum class SavedPart : uint8_t { kKept, kRecomputed };
// Gives `saved` memory for one part.
void allocate_block_saved(const Context& context, const TransformerBlock& block, int64_t rows,
                          Recompute level, SavedPart part, BlockSaved& saved);
// For all of it.
BlockSaved allocate_block_saved(const Context& context, const TransformerBlock& block, int64_t rows);

// Fills `saved` from x_in [T, H]. With x_out [T, H] undefined it stops once everything saved is there, which
// is what recomputation wants.
void block_forward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                   const View& x_in, BlockSaved& saved, const View& x_out);

// Fills the recomputed part of `saved` from x_in [T, H] and the part that was kept.
void block_recompute(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                     const View& x_in, Recompute level, BlockSaved& saved);

// dx [T, H]: in the gradient of x_out, out the gradient of x_in.
struct BlockGradient {
  View dx;
  bool first = false;   // the step's first addition: parameters' gradients are overwritten
  bool want_dx = true;  // false: dx is left as it is past the last trained parameter
};
// `saved` is used up.
void block_backward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                    const View& x_in, const BlockSaved& saved, const BlockGradient& gradient);

}  // namespace lm
