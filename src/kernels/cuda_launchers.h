// The GPU launchers, one .cu file per group. Private to src/kernels; other code calls through the table.
#pragma once

#include "kernels/kernels.h"

namespace lm::gpu {

#define LM_KERNEL(name, Args) void name(const Args&, StreamView);
#define LM_GPU_KERNEL LM_KERNEL
#include "kernels/kernels.inc"
void chunk_sums(const ChunkSums&, StreamView);

}  // namespace lm::gpu
