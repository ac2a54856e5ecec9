// Measured rates of a CPU besides that of large products; they differ between CPUs by more than that one
// does. Takes a tenth of a second and 4 MiB, once before a run; on the compute thread, CPU only.
#pragma once

#include "base/cuda.h"
#include "base/dtype.h"

namespace lm {

struct CpuRates {
  double attention_flops = 0;    // FLOP/s of a forward and a backward, visible keys only
  double gemm_call_seconds = 0;  // overhead of a small product beyond its FLOP: checks, uncached weights
  // Bytes/s of decoded nf4 weights: time of the decoding, and of the slower product after it.
  double decode_bandwidth = 0;
};
// From the faster calls, all above 0. `gemm_flops`: rate of large products.
CpuRates measure_cpu_rates(DType dtype, StreamView stream, double gemm_flops);

}  // namespace lm
