// The executables without CUDA: no table with these can be had, so they are never reached.
#include "base/error.h"
#include "kernels/library.h"

namespace lm {

bool gemm_cuda(const Gemm&, StreamView, int) {
  LM_CHECK(false, "GPU products in an executable without CUDA");
  return false;
}

void attention_forward_cuda(const AttentionForward&, StreamView) {
  LM_CHECK(false, "GPU attention in an executable without CUDA");
}

void attention_backward_cuda(const AttentionBackward&, StreamView) {
  LM_CHECK(false, "GPU attention in an executable without CUDA");
}

}  // namespace lm
