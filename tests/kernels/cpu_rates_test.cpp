// What a plan reads of a CPU's kernels.
#include "kernels/cpu_rates.h"

#include <gtest/gtest.h>

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
  }
}

}  // namespace
}  // namespace lm
