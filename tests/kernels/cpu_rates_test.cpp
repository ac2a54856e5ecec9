// What a plan reads of a CPU's kernels.
#include "kernels/cpu_rates.h"

#include <ATen/Context.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

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

// Ours take 1/5 to 1/60 of LibTorch's time there. Both add in fp32, but in another order: of 65,536 sums of
// 1000 terms some are rounded otherwise.
TEST(CpuRates, OfBf16ProductsAreNotThoseOfPlainLoops) {
  if (library_multiplies_bf16(best_instructions()))
    GTEST_SKIP() << "LibTorch's products have this processor's instructions";
  constexpr int64_t kRows = 256, kInner = 1000;
  const StreamView stream = start_torch(DeviceType::kCpu, 1, true);
  at::manual_seed(7);
  const at::Tensor a = at::randn({kRows, kInner}).to(at::kBFloat16),
                   b = at::randn({kInner, kRows}).to(at::kBFloat16);
  const at::Tensor library = at::mm(a, b);
  at::Tensor chosen = at::empty_like(library), own = at::empty_like(library);
  const auto view = [](const at::Tensor& x) {
    return view_of(x.data_ptr(), DType::kBF16, x.size(0), x.size(1));
  };
  library_kernels(DeviceType::kCpu).gemm({.a = view(a), .b = view(b), .out = view(chosen)}, stream);
  kernels(DeviceType::kCpu).gemm({.a = view(a), .b = view(b), .out = view(own)}, stream);
  EXPECT_TRUE(at::equal(chosen, own));
  EXPECT_FALSE(at::equal(chosen, library)) << "these matrices tell the two products apart";
}

}  // namespace
}  // namespace lm
