// The whole table of a device, for src/model: our kernels, and the libraries': products of matrices,
// attention on GPUs.
#pragma once

#include "base/bytes.h"
#include "kernels/kernels.h"

namespace lm {

// Throws Error(12) for CUDA in an executable without it. The table lives as long as the program; its
// functions belong to the compute thread, and on a GPU to ATen's current stream.
const Kernels& library_kernels(DeviceType device);

// Products on GPUs by cuBLASLt (gemm_cuda.cpp | no_library_cuda.cpp, chosen by the executable).
// `choice`: which of the algorithms that it proposes, the one it holds for the fastest first; others are for
// benchmarks. False, and nothing is computed, if it does not propose so many.
bool gemm_cuda(const Gemm& args, StreamView stream, int choice = 0);
// Device memory in which it splits sums: taken with the first product, and kept.
inline constexpr int64_t kGemmWorkspace = 32 * kMiB;

// Attention on GPUs by ATen (attention_cuda.cpp | no_library_cuda.cpp, chosen by the executable). What its
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
