// Sums of squares of granules on the GPU: 64 threads are the 64 lanes. The square of an fp32 number is exact
// in fp64, so the fused multiply-add here gives the bits of the CPU's two operations.
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"
#include "kernels/norms_formula.h"

namespace lm::gpu {
namespace {

template <class T>
__global__ void granule_sums(GranuleNorms a) {
  __shared__ double lane[kNormLanes];
  const int64_t granule = blockIdx.x;
  const T* x = static_cast<const T*>(a.x) + granule * kGranuleElements;
  double sum = 0;
  for (int i = threadIdx.x; i < kGranuleElements; i += kNormLanes) {
    const double v = static_cast<double>(to_float(x[i]));
    sum = __fma_rn(v, v, sum);
  }
  lane[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) a.sums[granule] = add_norm_lanes(lane);
}

}  // namespace

void granule_norms(const GranuleNorms& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    launch(granule_sums<decltype(t)>, static_cast<unsigned>(a.granules), kNormLanes, stream, a);
  });
}

}  // namespace lm::gpu
