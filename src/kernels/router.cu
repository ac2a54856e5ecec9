// Around a mixture's experts, on the GPU: factors of a shared expert's rows.
#include "kernels/activation_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

// Threads of a row, each a lane of the CPU's sum.
constexpr int kLanes = 16, kRows = kThreads / kLanes;

template <class T>
__device__ __forceinline__ T* row_of(const View& x, int64_t row) {
  return static_cast<T*>(x.data) + row * x.stride;
}

template <class T>
__global__ void gate(GateRows a) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  const bool there = r < a.x.rows;
  const int64_t width = there ? a.x.columns : 0;
  const int lane = threadIdx.x % kLanes;
  T* const x = row_of<T>(a.x, r);
  const float factor = there ? sigmoid(to_float(*row_of<T>(a.gate, r))) : 0.f;
  if (a.other.data != nullptr) {
    const T* const other = row_of<T>(a.other, r);
    float sum = 0;
    for (int64_t j = lane; j < width; j += kLanes) sum += to_float(x[j]) * to_float(other[j]);
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (there && lane == 0) *row_of<T>(a.dgate, r) = round_to<T>(sum * factor * (1.f - factor));
  }
  for (int64_t j = lane; j < width; j += kLanes) x[j] = round_to<T>(to_float(x[j]) * factor);
}

}  // namespace

void gate_rows(const GateRows& a, StreamView stream) {
  with_dtype(a.x.dtype,
             [&](auto t) { launch(gate<decltype(t)>, blocks_of(a.x.rows, kRows), kThreads, stream, a); });
}

}  // namespace lm::gpu
