// The machine's own ceiling: what its GEMM reaches on a shape like a model's, in FLOP/s; and what it keeps
// up.
#pragma once

#include "base/cuda.h"
#include "base/dtype.h"

namespace lm {

// Best of the products of 1024 x 1024 x 1024 that fit into some 100 ms, at least five; up to 500 ms until the
// best three are alike. CPU only.
struct GemmRate {
  double ceiling = 0;    // the best product's: the speed of light
  double sustained = 0;  // the median product's: what a step can expect on a machine that others use, too
};
GemmRate measure_gemm_rate(DType dtype, StreamView stream);

}  // namespace lm
