// What a step's time depends on beside the rate of large products: it differs between CPUs by more than that
// rate does. A tenth of a second and 4 MiB, once before a run; on the compute thread, CPU only.
#pragma once

#include "base/cuda.h"
#include "base/dtype.h"

namespace lm {

struct CpuRates {
  double attention_flops = 0;    // FLOP/s of a forward and a backward, visible keys alone
  double gemm_call_seconds = 0;  // of a small product beyond its FLOP: checks, weights that are in no cache
  // Bytes/s that decoding nf4 weights makes: its own time, and what a product takes longer after it.
  double decode_bandwidth = 0;
};
// Of the quicker calls, all above 0. `gemm_flops`: of large products.
CpuRates measure_cpu_rates(DType dtype, StreamView stream, double gemm_flops);

}  // namespace lm
