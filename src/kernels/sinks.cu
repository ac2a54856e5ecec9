// Attention sinks on the GPU: a warp has a head of a token, and for the sinks' gradient a block a head.
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

constexpr int kWarps = kThreads / 32;
// Of a head's tokens, which follow each other: a sum for each, and then theirs in order.
constexpr int kWarpsOfHead = 32;

template <class T>
__global__ void add(AddSinks a) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;  // in `out`
  if (at >= a.tokens * a.heads) return;
  const int64_t t = at / a.heads, h = at % a.heads;
  const int lane = threadIdx.x % 32;
  const float z = to_float(static_cast<const T*>(a.sinks)[h]), lse = a.lse[h * a.tokens + t];
  // log(e^lse + e^z) from the larger one: the other's exponential is at most 1.
  const float most = lse > z ? lse : z, least = lse > z ? z : lse;
  const float sum = most + log1pf(expf(least - most));
  const float factor = expf(lse - sum);
  T* const out = static_cast<T*>(a.out) + at * a.head_dim;
  for (int64_t j = lane; j < a.head_dim; j += 32) out[j] = round_to<T>(to_float(out[j]) * factor);
  __syncwarp();  // every lane has read it
  if (lane == 0) a.lse[h * a.tokens + t] = sum;
}

template <class T>
__global__ void gradient(SinksGradient a) {
  __shared__ double sums[kWarpsOfHead];
  const int64_t h = blockIdx.x;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const float z = to_float(static_cast<const T*>(a.sinks)[h]);
  double sum = 0;
  for (int64_t t = warp; t < a.tokens; t += kWarpsOfHead) {
    const int64_t at = (t * a.heads + h) * a.head_dim;
    const T* const out = static_cast<const T*>(a.out) + at;
    const T* const dout = static_cast<const T*>(a.dout) + at;
    float dot = 0;
    for (int64_t j = lane; j < a.head_dim; j += 32) dot += to_float(out[j]) * to_float(dout[j]);
    dot = warp_sum(dot);
    sum -= static_cast<double>(expf(z - a.lse[h * a.tokens + t])) * static_cast<double>(dot);
  }
  if (lane == 0) sums[warp] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double all = 0;
  for (int w = 0; w < kWarpsOfHead; ++w) all += sums[w];
  a.gradient[h] = static_cast<float>(all);
}

}  // namespace

void add_sinks(const AddSinks& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    launch(add<decltype(t)>, blocks_of(a.tokens * a.heads, kWarps), kThreads, stream, a);
  });
}

void sinks_gradient(const SinksGradient& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    launch(gradient<decltype(t)>, static_cast<unsigned>(a.heads), 32 * kWarpsOfHead, stream, a);
  });
}

}  // namespace lm::gpu
