// The machine's own ceiling: what its GEMM reaches on a shape like a model's, in FLOP/s.
#pragma once

#include "base/cuda.h"
#include "base/dtype.h"

namespace lm {

// Best of the products of 1024 x 1024 x 1024 that fit into some 100 ms, at least five. CPU only.
double measure_gemm_rate(DType dtype, StreamView stream);

}  // namespace lm
