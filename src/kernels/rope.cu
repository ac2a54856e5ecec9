// Rotary embedding on the GPU, in place: a block per row, so that the angles of its position stay in L1.
#include "kernels/block_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

template <class T>
__global__ void rotate(Rope a) {
  const int64_t r = blockIdx.x;
  const int half = static_cast<int>(a.head_dim / 2);
  const float* cos = a.cos + static_cast<int64_t>(a.position[r]) * half;
  const float* sin = a.sin + static_cast<int64_t>(a.position[r]) * half;
  T* row = static_cast<T*>(a.x) + r * a.x_stride;
  for (int k = threadIdx.x; k < a.heads * half; k += blockDim.x) {
    const int i = k % half;
    T* low = row + k / half * a.head_dim + i;
    const float c = cos[i], s = a.inverse ? -sin[i] : sin[i];
    float x = to_float(low[0]), y = to_float(low[half]);
    rope_turn(c, s, x, y);
    low[0] = round_to<T>(x);
    low[half] = round_to<T>(y);
  }
}

}  // namespace

void rope(const Rope& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    launch(rotate<decltype(t)>, static_cast<unsigned>(a.rows), kThreads, stream, a);
  });
}

}  // namespace lm::gpu
