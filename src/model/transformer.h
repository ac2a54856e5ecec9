// One transformer block with its explicit forward and backward:
//   x_mid = x_in + attention(norm(x_in));  x_out = x_mid + mlp(norm(x_mid))
// Families differ only in what the spec says (biases, q/k norms, windows), never in this code's shape. Saved
// activations and temporaries live in the arena; parameters are views into the block's arrays.
#pragma once

#include "model/linear.h"

namespace lm {

struct TransformerBlock {
  int64_t layer = 0;
  Param attention_norm;  // [H]
  Linear qkv;            // [Q, H]
  Param q_norm, k_norm;  // [d], undefined weights without q/k norms
  Linear out;            // [H, n_h d]
  Param mlp_norm;        // [H]
  Linear gate_up;        // [2F, H]
  Linear down;           // [H, F]
};

// What backward needs of a block's forward, in arena order. x_in, the block's input, belongs to the caller.
struct BlockSaved {
  View rstd1;      // [T] fp32
  View qkv;        // [T, Q], q and k normed and rotated
  View qk;         // [T, (n_h + n_kv) d] before the q/k norms; undefined without them
  View qk_rstd;    // [T, n_h + n_kv] fp32; likewise
  View attention;  // [T, n_h d]
  View lse;        // [n_h, T] fp32
  View x_mid;      // [T, H]
  View rstd2;      // [T] fp32
  View gate_up;    // [T, 2F]
  LinearSaved qkv_adapters, out_adapters, gate_up_adapters, down_adapters;
};

BlockSaved allocate_block_saved(const Context& context, const TransformerBlock& block, int64_t rows);

// Fills `saved` from x_in [T, H]. With x_out [T, H] undefined it stops once everything saved is there, which
// is what recomputation wants.
void block_forward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                   const View& x_in, BlockSaved& saved, const View& x_out);

// dx [T, H]: in the gradient of x_out, out the gradient of x_in (left as it is past the last trained
// parameter when `want_dx` is false). `saved` is used up.
void block_backward(const Context& context, const TransformerBlock& block, const DeviceBatch& batch,
                    const View& x_in, BlockSaved& saved, const View& dx, bool first, bool want_dx);

}  // namespace lm
