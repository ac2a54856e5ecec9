// The machine's measured GEMM rate on a shape like a model's, in FLOP/s: its peak and its sustained rate.
#pragma once

#include "base/cuda.h"
#include "base/dtype.h"

namespace lm {

// Best of the products of 1024 x 1024 x 1024 that fit into some 100 ms, at least five; up to 500 ms until the
// best three agree. CPU only.
struct GemmRate {
  double ceiling = 0;    // the best product's: the peak rate
  double sustained = 0;  // the median product's: the expected rate of a step on a shared machine
};
GemmRate measure_gemm_rate(DType dtype, StreamView stream);

}  // namespace lm
