#include "tests/emulator/self_kernels.h"

#include "kernels/cuda_common.cuh"

namespace lm::gpu {
namespace {

__global__ void early_return(float* x) {
  if (threadIdx.x >= 40) return;
  __syncthreads();
  x[threadIdx.x] = 1;
}
__global__ void two_barriers(float* x) {
  if (threadIdx.x < 32) {
    __syncthreads();
    x[threadIdx.x] = 1;
  } else {
    __syncthreads();
    x[threadIdx.x] = 2;
  }
}
__global__ void exited_lane(float* x) {
  if (threadIdx.x % 32 == 31) return;
  x[threadIdx.x] = __shfl_xor_sync(~0u, 1.f, 1);
}
__global__ void unnamed_lane(float* x) {
  x[threadIdx.x] = __shfl_xor_sync(1u, 1.f, 0);
}
__global__ void waits_in_a_warp(float* x) {
  if (threadIdx.x == 0) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  x[threadIdx.x] = 1;
}
__global__ void missing_barrier(float* x) {
  __shared__ float s[kFloats];
  s[threadIdx.x] = static_cast<float>(threadIdx.x);
  x[threadIdx.x] = s[63 - threadIdx.x];
  __syncthreads();
}
__global__ void uninitialised(float* x) {
  __shared__ float s[kFloats];
  if (threadIdx.x < 63) s[threadIdx.x] = 1;
  __syncthreads();
  x[threadIdx.x] = s[63 - threadIdx.x];
}
__global__ void past_end(float* x) {
  x[threadIdx.x + 1] = 1;
}
__global__ void before_begin(float* x) {
  x[-1] = x[threadIdx.x];
}
__global__ void wide_past_end(float* x) {
  store_pack<4>(x + kFloats - 4 + 4 * (threadIdx.x == 63), Pack<float, 4>{});
}
__global__ void far_past_end(float* x) {
  x[threadIdx.x + 100000] = 1;
}
__global__ void misaligned_pack(float* x) {
  store_pack<4>(x + 1, Pack<float, 4>{});
}
__global__ void misaligned_float(float* x) {
  float* volatile odd = reinterpret_cast<float*>(reinterpret_cast<char*>(x) + 2);
  *odd = 1;
}
__global__ void twice(float* x) {
  x[threadIdx.x] = 2 * x[threadIdx.x];
}

}  // namespace

void launch_self(SelfKernel kernel, float* x, StreamView stream, unsigned rows, int block) {
  static constexpr void (*kKernels[])(float*) = {
      early_return,    two_barriers,    exited_lane,      unnamed_lane, waits_in_a_warp,
      missing_barrier, uninitialised,   past_end,         before_begin, wide_past_end,
      far_past_end,    misaligned_pack, misaligned_float, twice};
  launch(kKernels[static_cast<size_t>(kernel)], dim3(1, rows), block, stream, x);
}

}  // namespace lm::gpu
