// Attention with AVX-512F.
#include "kernels/attention_portable.h"

namespace lm::attention {

const Path kAvx512 = {.name = "avx512",
                      .forward_f32 = forward_tile<Portable<16, float>>,
                      .forward_bf16 = forward_tile<Portable<16, BFloat16>>,
                      .forward_f16 = forward_tile<Portable<16, Fp16>>,
                      .backward_f32 = backward_tile<Portable<16, float>>,
                      .backward_bf16 = backward_tile<Portable<16, BFloat16>>,
                      .backward_f16 = backward_tile<Portable<16, Fp16>>};

}  // namespace lm::attention
