// Attention with AVX2 and fma.
#include "kernels/attention_portable.h"

namespace lm::attention {

const Path kAvx2 = {.name = "avx2",
                    .forward_f32 = forward_tile<Portable<8, float>>,
                    .forward_bf16 = forward_tile<Portable<8, BFloat16>>,
                    .forward_f16 = forward_tile<Portable<8, Fp16>>,
                    .backward_f32 = backward_tile<Portable<8, float>>,
                    .backward_bf16 = backward_tile<Portable<8, BFloat16>>,
                    .backward_f16 = backward_tile<Portable<8, Fp16>>};

}  // namespace lm::attention
