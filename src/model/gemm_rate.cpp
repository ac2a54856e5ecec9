#include "model/gemm_rate.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"
#include "model/tensor.h"

namespace lm {

double measure_gemm_rate(DType dtype, StreamView stream) {
  LM_CHECK(stream.device == DeviceType::kCpu, "a GPU's ceiling is its specification");
  constexpr int64_t kSize = 1024;
  constexpr int kLeastWindows = 5;
  constexpr double kSeconds = 0.1;
  const at::Tensor a = at::ones({kSize, kSize}, torch_type(dtype)),
                   b = at::ones({kSize, kSize}, torch_type(dtype));
  at::Tensor out = at::mm(a, b);  // the first call prepares the primitive
  // Every window is one product (7 ms where 300 GFLOP/s are reached): other programs take the processor for
  // some milliseconds at a time, so on a busy machine most windows read low and one or two tell the ceiling.
  // A mean, or fewer windows, would make sol_pct read high.
  double best = 1e9;
  const double begin = monotonic_seconds();
  for (int window = 0; window < kLeastWindows || monotonic_seconds() - begin < kSeconds; ++window) {
    const double start = monotonic_seconds();
    at::mm_out(out, a, b);
    best = std::min(best, monotonic_seconds() - start);
  }
  return 2.0 * kSize * kSize * kSize / best;
}

}  // namespace lm
