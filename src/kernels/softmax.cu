// Softmax cross-entropy on the GPU: a block per row of a vocabulary segment.
#include "kernels/block_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

template <class T, int n>
__global__ void statistics(SoftmaxStatistics a) {
  const int64_t r = blockIdx.x;
  const T* x = static_cast<const T*>(a.logits) + r * a.stride;
  const float infinity = __int_as_float(0x7F800000);
  // Read before the barriers of the reductions; thread 0 writes after them.
  const float old_max = a.first_segment ? -infinity : a.max[r];
  float largest = -infinity;
  for (int64_t j = int64_t{threadIdx.x} * n; j < a.columns; j += int64_t{kThreads} * n) {
    const Pack<T, n> v = load_pack<n>(x + j);
    for (int i = 0; i < n; ++i) largest = largest < to_float(v.at[i]) ? to_float(v.at[i]) : largest;
  }
  largest = block_max(largest);
  const float new_max = old_max < largest ? largest : old_max;
  float sum = 0;
  for (int64_t j = int64_t{threadIdx.x} * n; j < a.columns; j += int64_t{kThreads} * n) {
    const Pack<T, n> v = load_pack<n>(x + j);
    for (int i = 0; i < n; ++i) sum += expf(to_float(v.at[i]) - new_max);
  }
  sum = block_sum(sum);
  if (threadIdx.x != 0) return;
  const float carried = a.first_segment ? 0.f : a.sum[r] * expf(old_max - new_max);
  a.max[r] = new_max;
  a.sum[r] = carried + sum;
  const int64_t column = a.target[r] - a.first_column;
  if (column >= 0 && column < a.columns) a.target_logit[r] = to_float(x[column]);
}

template <class T, int n>
__global__ void gradient(SoftmaxGradient a) {
  const int64_t r = blockIdx.x, j = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n;
  if (j >= a.columns) return;
  T* x = static_cast<T*>(a.logits) + r * a.stride + j;
  const float lse = a.max[r] + logf(a.sum[r]);
  const float scale = a.weight == nullptr ? a.scale : a.scale * a.weight[r];
  const int64_t target = a.target[r] - a.first_column - j;
  Pack<T, n> v = load_pack<n>(x);
  for (int i = 0; i < n; ++i) {
    v.at[i] = round_to<T>(lm::softmax_gradient(to_float(v.at[i]), lse, i == target ? 1.f : 0.f, scale));
  }
  store_pack<n>(x, v);
}

// One block; thread 0 adds the terms of each batch in row order.
__global__ void loss(SoftmaxLoss a) {
  __shared__ double term[kThreads];
  double total = 0;
  for (int64_t first = 0; first < a.rows; first += kThreads) {
    const int64_t r = first + threadIdx.x;
    if (r < a.rows) {
      const float nll = a.max[r] + logf(a.sum[r]) - a.target_logit[r];
      if (a.nll != nullptr) a.nll[r] = nll;
      term[threadIdx.x] = static_cast<double>(nll) * (a.weight == nullptr ? 1.f : a.weight[r]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const int count = static_cast<int>(min(a.rows - first, int64_t{kThreads}));
      for (int i = 0; i < count; ++i) total += term[i];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) *a.total += total;
}

}  // namespace

void softmax_statistics(const SoftmaxStatistics& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    const unsigned grid = static_cast<unsigned>(a.rows);
    if (a.columns % kPack<T> == 0 && a.stride % kPack<T> == 0 && aligned(16, a.logits)) {
      return launch(statistics<T, kPack<T>>, grid, kThreads, stream, a);
    }
    launch(statistics<T, 1>, grid, kThreads, stream, a);
  });
}

void softmax_gradient(const SoftmaxGradient& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    const unsigned rows = static_cast<unsigned>(a.rows);
    if (a.columns % kPack<T> == 0 && a.stride % kPack<T> == 0 && aligned(16, a.logits)) {
      return launch(gradient<T, kPack<T>>, dim3(rows, blocks_of(a.columns, kThreads * kPack<T>)), kThreads,
                    stream, a);
    }
    launch(gradient<T, 1>, dim3(rows, blocks_of(a.columns, kThreads)), kThreads, stream, a);
  });
}

void softmax_loss(const SoftmaxLoss& a, StreamView stream) {
  launch(loss, 1, kThreads, stream, a);
}

}  // namespace lm::gpu
