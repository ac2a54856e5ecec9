#include "kernels/gemm_rate.h"

#include <ATen/ops/ones.h>

#include <algorithm>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "kernels/aten.h"
#include "kernels/library.h"

namespace lm {

GemmRate measure_gemm_rate(DType dtype, StreamView stream) {
  LM_CHECK(stream.device == DeviceType::kCpu, "a GPU's ceiling is its specification");
  constexpr int64_t kSize = 1024;
  constexpr size_t kLeastWindows = 5;
  constexpr double kSeconds = 0.1, kMostSeconds = 0.5;
  constexpr double kAlike = 1.05;
  const at::Tensor ones = at::ones({3 * kSize, kSize}, torch_type(dtype));
  const View matrices = view_of(ones.data_ptr(), dtype, 3 * kSize, kSize);
  const auto matrix = [&](int64_t i) { return matrices.row_range(i * kSize, kSize); };
  const Kernels& kernels = library_kernels(DeviceType::kCpu);
  const auto product = [&] { kernels.gemm({.a = matrix(0), .b = matrix(1), .out = matrix(2)}, stream); };
  product();  // the first call prepares the primitive
  // Every window is one product (7 ms where 300 GFLOP/s are reached): other programs take the processor for
  // some milliseconds at a time, so on a busy machine most windows read low and one or two tell the ceiling.
  // A mean, or fewer windows, would make sol_pct read high. And a ceiling shows itself more than once: while
  // the best windows differ, the machine was never quiet for long, and it is worth going on.
  std::vector<double> windows;  // seconds, ascending
  const double begin = monotonic_seconds();
  const auto enough = [&] {
    const double taken = monotonic_seconds() - begin;
    if (windows.size() < kLeastWindows || taken < kSeconds) return false;
    return windows[2] <= kAlike * windows[0] || taken >= kMostSeconds;
  };
  while (!enough()) {
    const double start = monotonic_seconds();
    product();
    const double seconds = monotonic_seconds() - start;
    windows.insert(std::upper_bound(windows.begin(), windows.end(), seconds), seconds);
  }
  constexpr double kFlops = 2.0 * kSize * kSize * kSize;
  return {kFlops / windows[0], kFlops / windows[windows.size() / 2]};
}

}  // namespace lm
