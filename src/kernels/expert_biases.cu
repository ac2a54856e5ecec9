// Biases of a mixture's experts on the GPU: one launch for many experts, whose rows are counted on the
// device.
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

constexpr int kColumns = 128;  // threads of a block, each with a column

// The expert of `row`, by `start`; count: it is none of theirs. Every thread of the block must call, for the
// same row.
__device__ __forceinline__ int expert_of(const int32_t* start, int64_t count, int64_t row) {
  __shared__ int found;
  if (threadIdx.x == 0) found = static_cast<int>(count);
  __syncthreads();
  for (int64_t e = threadIdx.x; e < count; e += kColumns) {
    if (start[e] <= row && row < start[e + 1]) found = static_cast<int>(e);  // of one thread at most
  }
  __syncthreads();
  return found;
}

template <class T>
__global__ void add(AddExpertBiases a) {
  const int64_t row = blockIdx.x;
  const int expert = expert_of(a.start, a.count, row);
  if (expert == a.count || a.bias[expert] == nullptr) return;
  const T* const bias = static_cast<const T*>(a.bias[expert]);
  T* const x = static_cast<T*>(a.x.data) + row * a.x.stride;
  for (int64_t j = threadIdx.x; j < a.x.columns; j += kColumns)
    x[j] = round_to<T>(to_float(x[j]) + to_float(bias[j]));
}

template <class T, class Gradient>
__global__ void sum_rows_of(ExpertBiasGradients a) {
  const int64_t e = blockIdx.y, j = static_cast<int64_t>(blockIdx.x) * kColumns + threadIdx.x;
  Gradient* const gradient = static_cast<Gradient*>(a.gradient[e]);
  const int64_t begin = a.start[e], end = a.start[e + 1];
  if (gradient == nullptr || j >= a.dy.columns || (begin == end && !a.overwrite)) return;
  const T* const dy = static_cast<const T*>(a.dy.data) + j;
  float sum = 0;
#pragma unroll 8  // loads at a time: the additions wait for each other
  for (int64_t r = begin; r < end; ++r) sum += to_float(dy[r * a.dy.stride]);
  gradient[j] = round_to<Gradient>(a.overwrite ? sum : to_float(gradient[j]) + sum);
}

}  // namespace

void add_expert_biases(const AddExpertBiases& a, StreamView stream) {
  with_dtype(a.x.dtype,
             [&](auto t) { launch(add<decltype(t)>, static_cast<unsigned>(a.x.rows), kColumns, stream, a); });
}

void expert_bias_gradients(const ExpertBiasGradients& a, StreamView stream) {
  const dim3 grid(blocks_of(a.dy.columns, kColumns), static_cast<unsigned>(a.count));
  with_dtype(a.dy.dtype, [&](auto t) {
    with_gradient_dtype(a.gradient_dtype, [&](auto g) {
      launch(sum_rows_of<decltype(t), decltype(g)>, grid, kColumns, stream, a);
    });
  });
}

}  // namespace lm::gpu
