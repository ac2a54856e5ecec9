// Rotary embedding on the GPU, in place: a block has heads of one row, so that the angles of its position
// stay in L1; a thread turns n neighbouring pairs: 16 bytes of either half of a head.
#include "kernels/block_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

constexpr int kBlock = 128;  // 8 heads of 128 elements are 64 threads of packs

// n angles in accesses of at most 16 bytes.
template <int n>
__device__ __forceinline__ Pack<float, n> load_angles(const float* from) {
  constexpr int kEach = n < 4 ? n : 4;
  Pack<float, n> angles;
  for (int i = 0; i < n; i += kEach) {
    const Pack<float, kEach> part = load_pack<kEach>(from + i);
    for (int k = 0; k < kEach; ++k) angles.at[i + k] = part.at[k];
  }
  return angles;
}

template <class T, int n>
__global__ void rotate(Rope a) {
  const int64_t r = blockIdx.x;
  const unsigned half = static_cast<unsigned>(a.head_dim / 2), packs = half / n;
  const unsigned k = blockIdx.y * blockDim.x + threadIdx.x;
  if (k >= a.heads * packs) return;
  const unsigned i = k % packs * n;
  T* low = static_cast<T*>(a.x) + r * a.x_stride + k / packs * a.head_dim + i;
  // Asked for before the position, which the angles wait for.
  const Pack<T, n> x = load_pack<n>(low), y = load_pack<n>(low + half);
  const int64_t angles = static_cast<int64_t>(a.position[r]) * half + i;
  const Pack<float, n> c = load_angles<n>(a.cos + angles), s = load_angles<n>(a.sin + angles);
  float u[n], v[n];
  for (int e = 0; e < n; ++e) {
    u[e] = to_float(x.at[e]), v[e] = to_float(y.at[e]);
    rope_turn(c.at[e], a.inverse ? -s.at[e] : s.at[e], u[e], v[e]);
  }
  store_rounded(low, u);
  store_rounded(low + half, v);
}

template <int n>
dim3 grid_of(const Rope& a) {
  return dim3(static_cast<unsigned>(a.rows), blocks_of(a.heads * (a.head_dim / 2), int64_t{kBlock} * n));
}

}  // namespace

void rope(const Rope& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    if (a.head_dim % (2 * kPack<T>) == 0 && a.x_stride % kPack<T> == 0 && aligned(16, a.x, a.cos, a.sin)) {
      return launch(rotate<T, kPack<T>>, grid_of<kPack<T>>(a), kBlock, stream, a);
    }
    launch(rotate<T, 1>, grid_of<1>(a), kBlock, stream, a);
  });
}

}  // namespace lm::gpu
