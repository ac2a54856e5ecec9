// Sums of squares of granules, and dividing by their root, on the GPU: 64 threads are the 64 lanes. The
// square of an fp32 number is exact in fp64, so the fused multiply-add here gives the bits of the CPU's two
// operations.
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

__global__ void take_root(Normalise a) {
  __shared__ double lane[kNormLanes];
  double sum = 0;
  for (int64_t g = threadIdx.x; g < a.granules; g += kNormLanes) sum += a.sums[g];
  lane[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x == 0) *a.norm = norm_of(add_norm_lanes(lane), a.least);
}

__global__ void divide(Normalise a) {
  Bf16* const x = static_cast<Bf16*>(a.x);
  const float norm = *a.norm;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.elements; i += step)
    x[i] = round_to<Bf16>(one_nan(to_float(x[i]) / norm));
}

}  // namespace

void granule_norms(const GranuleNorms& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    launch(granule_sums<decltype(t)>, static_cast<unsigned>(a.granules), kNormLanes, stream, a);
  });
}

void normalise(const Normalise& a, StreamView stream) {
  launch(take_root, 1u, kNormLanes, stream, a);
  launch(divide, stride_blocks(a.elements), kThreads, stream, a);
}

}  // namespace lm::gpu
