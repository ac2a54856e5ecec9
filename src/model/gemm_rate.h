// The machine's own ceiling: what its GEMM reaches on a shape like a model's, in FLOP/s.
#pragma once

#include "base/cuda.h"
#include "base/dtype.h"

namespace lm {

// Best of a few products of 1024 x 1024 x 1024, some 50 ms in all on a slow CPU. CPU only.
double measure_gemm_rate(DType dtype, StreamView stream);

}  // namespace lm
