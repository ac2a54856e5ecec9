// Causal attention over the documents of a micro-batch, on q, k, v as slices of the fused projection.
#pragma once

#include "model/context.h"

namespace lm {

// out [T, n_h d], lse fp32 [n_h, T] from qkv [T, Q] (rotated) of a layer; the batch's cache takes its keys
// and values.
void attention_forward(const Context& context, const DeviceBatch& batch, int64_t layer, const View& qkv,
                       const View& out, const View& lse);

// dqkv [T, Q] from dout [T, n_h d] and what the forward pass saved. `window`: 0 = every earlier token of the
// document.
void attention_backward(const Context& context, const DeviceBatch& batch, int64_t window, const View& dout,
                        const View& qkv, const View& out, const View& lse, const View& dqkv);

}  // namespace lm
