// How often the GPU kernels' tests run a case. A GPU runs threads as it likes: twice, and both results must
// be the same. The emulator can be told in which order, and what fresh memory holds:
// tests/emulator/device/variants.cpp has stronger definitions of the two.
#pragma once

namespace lm {

int gpu_variants();
// Before the case runs for the variant-th time; after the last, once more with 0.
void use_gpu_variant(int variant);

}  // namespace lm
