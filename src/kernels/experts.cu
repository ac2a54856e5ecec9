// What is done with the rows of experts on the GPU, beside products: weights and sums in the CPU's order.
// Compiled with -fmad=false: these bits are the CPU's.
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

constexpr int kWarps = kThreads / 32;
// Threads of a row, each a lane of the CPU's sum.
constexpr int kLanes = 16, kRows = kThreads / kLanes;

// A warp per row.
template <class T>
__global__ void router_gradient(RouteBackward a) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32, k = a.chosen;
  if (t >= a.dlogits.rows) return;
  const int n = static_cast<int>(a.dlogits.columns), lane = threadIdx.x % 32;
  T* const out = static_cast<T*>(a.dlogits.data) + t * a.dlogits.stride;
  if (t >= a.tokens) {
    for (int e = lane; e < n; e += 32) out[e] = round_to<T>(0.f);
    return;
  }
  const float* const p = a.probability + t * n;
  const float* const g = a.dweight + t * k;
  const int32_t* const expert = a.routing.expert + t * k;
  const bool sigmoid = a.scores.sigmoid;
  float sum = a.renormalise ? 0.f : 1.f, mean = 0;
  for (int64_t j = 0; a.renormalise && j < k; ++j) sum += p[expert[j]];
  if (a.renormalise && sigmoid) sum += kLeastScores;
  // Scores that nothing divides have nothing to do with each other.
  for (int64_t j = 0; (a.renormalise || !sigmoid) && j < k; ++j) mean += p[expert[j]] / sum * g[j];
  for (int e = lane; e < n; e += 32) {
    float d = a.renormalise || sigmoid ? 0.f : -p[e] * mean;
    for (int64_t j = 0; j < k; ++j) {
      if (expert[j] != e) continue;
      d = sigmoid ? a.scores.scale / sum * (g[j] - mean) * p[e] * (1.f - p[e]) : p[e] / sum * (g[j] - mean);
    }
    out[e] = round_to<T>(d);
  }
}

template <class T>
__global__ void weigh(WeighRows a) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes, width = a.x.columns;
  const int lane = threadIdx.x % kLanes;
  const bool there = r < a.x.rows;
  const int64_t slot = !there ? -1 : a.routing.slot == nullptr ? r : a.routing.slot[r];
  T* const x = static_cast<T*>(a.x.data) + r * a.x.stride;
  if (a.other.data != nullptr) {
    const T* const other = static_cast<const T*>(a.other.data) + r * a.other.stride;
    float sum = 0;
    for (int64_t j = lane; slot >= 0 && j < width; j += kLanes) sum += to_float(x[j]) * to_float(other[j]);
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (slot >= 0 && lane == 0) a.dot[slot] = sum;
  }
  if (!there) return;
  const float weight = slot >= 0 ? a.routing.weight[slot] : 0.f;
  for (int64_t j = lane; j < width; j += kLanes)
    x[j] = round_to<T>(slot >= 0 ? to_float(x[j]) * weight : 0.f);
}

template <class T, int n>
__global__ void combine(CombineRows a) {
  const int64_t t = blockIdx.x, j = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n;
  if (j >= a.out.columns) return;
  const int64_t begin = t * a.chosen, end = begin + (t < a.tokens ? a.chosen : 0);
  float sum[n] = {};
  for (int64_t s = begin; s < end; ++s) {
    const Loaded<T, n> v = load<n>(static_cast<const T*>(a.x.data) + a.routing.row[s] * a.x.stride + j);
    float x[n];
    unpack<T>(v, x);
    const float weight = a.weighted ? a.routing.weight[s] : 1.f;
    for (int i = 0; i < n; ++i) sum[i] = sum[i] + (a.weighted ? weight * x[i] : x[i]);
  }
  if (a.addend.data != nullptr) {
    const Loaded<T, n> v = load<n>(static_cast<const T*>(a.addend.data) + t * a.addend.stride + j);
    float x[n];
    unpack<T>(v, x);
    for (int i = 0; i < n; ++i) sum[i] = x[i] + sum[i];
  }
  store_rounded(static_cast<T*>(a.out.data) + t * a.out.stride + j, sum);
}

template <class T>
bool in_packs(const View& x) {
  return x.stride % kPack<T> == 0 && aligned(16, x.data);
}

}  // namespace

void route_backward(const RouteBackward& a, StreamView stream) {
  with_dtype(a.dlogits.dtype, [&](auto t) {
    launch(router_gradient<decltype(t)>, blocks_of(a.dlogits.rows, kWarps), kThreads, stream, a);
  });
}

void weigh_rows(const WeighRows& a, StreamView stream) {
  with_dtype(a.x.dtype,
             [&](auto t) { launch(weigh<decltype(t)>, blocks_of(a.x.rows, kRows), kThreads, stream, a); });
}

void combine_rows(const CombineRows& a, StreamView stream) {
  with_dtype(a.out.dtype, [&](auto t) {
    using T = decltype(t);
    constexpr int kThreadsOfRow = 128, n = kPack<T>;
    const int64_t width = a.out.columns;
    const auto rows = static_cast<unsigned>(a.out.rows);
    if (width % n == 0 && in_packs<T>(a.x) && in_packs<T>(a.out) && in_packs<T>(a.addend))
      return launch(combine<T, n>, dim3(rows, blocks_of(width, kThreadsOfRow * n)), kThreadsOfRow, stream, a);
    launch(combine<T, 1>, dim3(rows, blocks_of(width, kThreadsOfRow)), kThreadsOfRow, stream, a);
  });
}

}  // namespace lm::gpu
