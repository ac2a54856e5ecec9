// The whole table of a device, for src/model: our kernels, and LibTorch's: products of matrices, attention on
// GPUs.
#pragma once

#include "kernels/kernels.h"

namespace lm {

// Throws Error(12) for CUDA in an executable without it. The table lives as long as the program; its
// functions belong to the compute thread, and on a GPU to ATen's current stream.
const Kernels& library_kernels(DeviceType device);

// Attention on GPUs by ATen (attention_cuda.cpp | no_attention_cuda.cpp, chosen by the executable). What its
// own attention does not compute goes in chunks, by products of matrices (attention_chunks.h).
void attention_forward_cuda(const AttentionForward& args, StreamView stream);
void attention_backward_cuda(const AttentionBackward& args, StreamView stream);
// Its scratch: none for forward, and for backward a random state that is never read.
inline int64_t attention_forward_scratch_cuda(const AttentionForward&, StreamView) {
  return 0;
}
inline int64_t attention_backward_scratch_cuda(const AttentionBackward&, StreamView) {
  return 2 * sizeof(int64_t);
}

}  // namespace lm
