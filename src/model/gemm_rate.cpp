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
  constexpr int kRounds = 5;
  const at::Tensor a = at::ones({kSize, kSize}, torch_type(dtype)),
                   b = at::ones({kSize, kSize}, torch_type(dtype));
  at::Tensor out = at::mm(a, b);  // the first call prepares the primitive
  double best = 1e9;
  for (int round = 0; round < kRounds; ++round) {
    const double start = monotonic_seconds();
    at::mm_out(out, a, b);
    best = std::min(best, monotonic_seconds() - start);
  }
  return 2.0 * kSize * kSize * kSize / best;
}

}  // namespace lm
