// The clamped GLU on the GPU: a thread has n neighbouring pairs of gate and up.
#include "kernels/clamped_glu_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

// n pairs; a single one may lie anywhere.
template <int n, class T>
__device__ __forceinline__ Pack<T, 2 * n> load_pairs(const T* from) {
  if constexpr (n > 1) return load_pack<2 * n>(from);
  Pack<T, 2 * n> out;
  out.at[0] = from[0], out.at[1] = from[1];
  return out;
}
template <int n, class T>
__device__ __forceinline__ void store_pairs(T* to, const Pack<T, 2 * n>& pairs) {
  if constexpr (n > 1) return store_pack<2 * n>(to, pairs);
  to[0] = pairs.at[0], to[1] = pairs.at[1];
}

// Rows lie side by side, so that pair i of all is that of element i of h.
template <class T, int n>
__global__ void forward(ClampedGluForward a) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * n;
  if (i >= a.rows * a.ffn) return;
  const Pack<T, 2 * n> both = load_pairs<n>(static_cast<const T*>(a.gate_up) + 2 * i);
  Pack<T, n> h;
  for (int k = 0; k < n; ++k)
    h.at[k] =
        round_to<T>(clamped_glu(to_float(both.at[2 * k]), to_float(both.at[2 * k + 1]), a.alpha, a.limit));
  store_pack<n>(static_cast<T*>(a.out) + i, h);
}

template <class T, int n>
__global__ void backward(ClampedGluBackward a) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * n;
  if (i >= a.rows * a.ffn) return;
  T* const at = static_cast<T*>(a.gate_up) + 2 * i;
  T* const dh = static_cast<T*>(a.dh) + i;
  Pack<T, 2 * n> both = load_pairs<n>(at);
  Pack<T, n> d = load_pack<n>(dh);
  for (int k = 0; k < n; ++k) {
    float gate = to_float(both.at[2 * k]), up = to_float(both.at[2 * k + 1]), h = to_float(d.at[k]);
    clamped_glu_backward_at(gate, up, h, a.alpha, a.limit);
    both.at[2 * k] = round_to<T>(gate);
    both.at[2 * k + 1] = round_to<T>(up);
    d.at[k] = round_to<T>(h);
  }
  store_pairs<n>(at, both);
  store_pack<n>(dh, d);
}

template <int n>
dim3 grid_of(int64_t elements) {
  return dim3(blocks_of(elements, int64_t{kThreads} * n));
}

}  // namespace

void clamped_glu_forward(const ClampedGluForward& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    constexpr int n = kPack<T> / 2;
    const int64_t elements = a.rows * a.ffn;
    if (elements % n == 0 && aligned(16, a.gate_up) && aligned(8, a.out))
      return launch(forward<T, n>, grid_of<n>(elements), kThreads, stream, a);
    launch(forward<T, 1>, grid_of<1>(elements), kThreads, stream, a);
  });
}

void clamped_glu_backward(const ClampedGluBackward& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    constexpr int n = kPack<T> / 2;
    const int64_t elements = a.rows * a.ffn;
    if (elements % n == 0 && aligned(16, a.gate_up) && aligned(8, a.dh))
      return launch(backward<T, n>, grid_of<n>(elements), kThreads, stream, a);
    launch(backward<T, 1>, grid_of<1>(elements), kThreads, stream, a);
  });
}

}  // namespace lm::gpu
