// The executables without CUDA: no context with a GPU can exist, so these are never reached.
#include "base/error.h"
#include "model/attention.h"

namespace lm {

void attention_forward_cuda(const Context&, const DeviceBatch&, int64_t, const at::Tensor&, const at::Tensor&,
                            const at::Tensor&) {
  LM_CHECK(false, "GPU attention in an executable without CUDA");
}

void attention_backward_cuda(const Context&, const DeviceBatch&, int64_t, const at::Tensor&,
                             const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
  LM_CHECK(false, "GPU attention in an executable without CUDA");
}

}  // namespace lm
