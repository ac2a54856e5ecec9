// What a plan reads of a CPU's kernels.
#include "kernels/cpu_rates.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/clock.h"
#include "kernels/gemm_panels.h"
#include "kernels/library.h"

#include "kernels/runtime.h"

namespace lm {
namespace {

// Whatever the rate of large products was measured at: one beside others' work may be so low that a small
// product takes less than its FLOP would. 0 is a rate that was not measured, and disbelieved.
TEST(CpuRates, AreAboveZero) {
  const StreamView stream = start_torch(DeviceType::kCpu, 1, true);
  for (const double gemm_flops : {1e6, 1e15}) {
    const CpuRates rates = measure_cpu_rates(DType::kF32, stream, gemm_flops);
    EXPECT_GT(rates.attention_flops, 0);
    EXPECT_GT(rates.gemm_call_seconds, 0);
    EXPECT_LT(rates.gemm_call_seconds, 0.1);
    EXPECT_GT(rates.decode_bandwidth, 1e7);
    EXPECT_LE(rates.decode_bandwidth, 1e12);
  }
}

// Ours were 8 times as quick where the right matrix lies transposed, and 60 times where it does not.
TEST(CpuRates, OfBf16ProductsAreNotThoseOfPlainLoops) {
  if (library_multiplies_bf16()) GTEST_SKIP() << "LibTorch's products have this processor's instructions";
  constexpr int64_t kSize = 256;
  const StreamView stream = start_torch(DeviceType::kCpu, 1, true);
  const at::Tensor x = at::ones({3 * kSize, kSize}, at::kBFloat16);
  const at::Tensor a = x.narrow(0, 0, kSize), b = x.narrow(0, kSize, kSize);
  const auto view = [&](int64_t i) {
    return view_of(x.data_ptr(), DType::kBF16, 3 * kSize, kSize).row_range(i * kSize, kSize);
  };
  for (const bool transpose_b : {false, true}) {
    std::vector<double> ours, plain;
    const auto timed = [](std::vector<double>& seconds, const auto& product) {
      const double start = monotonic_seconds();
      product();
      seconds.push_back(monotonic_seconds() - start);
    };
    for (int i = 0; i < 7; ++i) {
      timed(plain, [&] { at::mm(a, transpose_b ? b.t() : b); });
      timed(ours, [&] {
        library_kernels(DeviceType::kCpu)
            .gemm({.a = view(0), .b = view(1), .out = view(2), .transpose_b = transpose_b}, stream);
      });
    }
    EXPECT_LT(3 * std::ranges::min(ours), std::ranges::min(plain)) << "transposed: " << transpose_b;
  }
}

}  // namespace
}  // namespace lm
