// Attention with the instructions that every 64-bit machine has.
#include "kernels/attention_portable.h"

namespace lm::attention {

const Path kBaseline = {.name = "baseline",
                        .forward_f32 = forward_tile<Portable<4, float>>,
                        .forward_bf16 = forward_tile<Portable<4, BFloat16>>,
                        .forward_f16 = forward_tile<Portable<4, Fp16>>,
                        .backward_f32 = backward_tile<Portable<4, float>>,
                        .backward_bf16 = backward_tile<Portable<4, BFloat16>>,
                        .backward_f16 = backward_tile<Portable<4, Fp16>>};

}  // namespace lm::attention
