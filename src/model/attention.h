// Causal attention over the documents of a micro-batch, on q, k, v as slices of the fused projection. On the
// CPU our own kernel; on GPUs ATen's flash kernels (attention_cuda.cpp | no_attention_cuda.cpp, chosen by the
// executable).
#pragma once

#include "model/context.h"

namespace lm {

// out [T, n_h d], lse fp32 [n_h, T] from qkv [T, Q] (rotated). `window`: 0 = every earlier token of the
// document.
void attention_forward(const Context& context, const DeviceBatch& batch, int64_t window,
                       const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& lse);

// dqkv [T, Q] from dout [T, n_h d] and what the forward pass saved.
void attention_backward(const Context& context, const DeviceBatch& batch, int64_t window,
                        const at::Tensor& dout, const at::Tensor& qkv, const at::Tensor& out,
                        const at::Tensor& lse, const at::Tensor& dqkv);

// The GPU's half.
void attention_forward_cuda(const Context& context, const DeviceBatch& batch, int64_t window,
                            const at::Tensor& qkv, const at::Tensor& out, const at::Tensor& lse);
void attention_backward_cuda(const Context& context, const DeviceBatch& batch, int64_t window,
                             const at::Tensor& dout, const at::Tensor& qkv, const at::Tensor& out,
                             const at::Tensor& lse, const at::Tensor& dqkv);

}  // namespace lm
