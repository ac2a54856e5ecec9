// Attention with AVX-512's products of bf16 pairs.
#include "kernels/attention_avx512_bf16.h"

namespace lm::attention {

const Path kAvx512Bf16 = {.name = "avx512_bf16",
                          .forward_f32 = nullptr,
                          .forward_bf16 = forward_tile<Avx512Bf16>,
                          .forward_f16 = nullptr,
                          .backward_f32 = nullptr,
                          .backward_bf16 = backward_tile<Avx512Bf16>,
                          .backward_f16 = nullptr};

}  // namespace lm::attention
