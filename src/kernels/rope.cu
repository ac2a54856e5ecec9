// Rotary embedding on the GPU, in place: a block has heads of one row, so that the angles of its position
// stay in L1; a thread turns n pairs: 16 bytes of either half of what a head turns, or 32 bytes in a row. And
// the scale by position of queries behind it.
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

// a.dim is set.
template <class T, int n, bool neighbours>
__global__ void rotate(Rope a) {
  const int64_t r = blockIdx.x;
  const unsigned half = static_cast<unsigned>(a.dim / 2), packs = half / n;
  const unsigned k = blockIdx.y * blockDim.x + threadIdx.x;
  if (k >= a.heads * packs) return;
  const unsigned i = k % packs * n;
  T* low = static_cast<T*>(a.x) + r * a.x_stride + k / packs * a.head_dim + (neighbours ? 2 * i : i);
  T* high = low + (neighbours ? n : half);
  // Asked for before the position, which the angles wait for.
  const Pack<T, n> x = load_pack<n>(low), y = load_pack<n>(high);
  const int64_t angles = static_cast<int64_t>(a.position[r]) * half + i;
  const Pack<float, n> c = load_angles<n>(a.cos + angles), s = load_angles<n>(a.sin + angles);
  float both[2][n];
  for (int e = 0; e < n; ++e) both[0][e] = to_float(x.at[e]), both[1][e] = to_float(y.at[e]);
  for (int e = 0; e < n; ++e) {
    const int one = neighbours ? 2 * e : e, other = neighbours ? 2 * e + 1 : n + e;
    rope_turn(c.at[e], a.inverse ? -s.at[e] : s.at[e], both[one / n][one % n], both[other / n][other % n]);
  }
  store_rounded(low, both[0]);
  store_rounded(high, both[1]);
}

template <int n>
dim3 grid_of(const Rope& a) {
  return dim3(static_cast<unsigned>(a.rows), blocks_of(a.heads * (a.dim / 2), int64_t{kBlock} * n));
}

template <class T, bool neighbours>
void rotate_as(const Rope& a, StreamView stream) {
  constexpr int n = kPack<T>;
  if (a.dim % (2 * n) == 0 && a.head_dim % n == 0 && a.x_stride % n == 0 && aligned(16, a.x, a.cos, a.sin)) {
    return launch(rotate<T, n, neighbours>, grid_of<n>(a), kBlock, stream, a);
  }
  launch(rotate<T, 1, neighbours>, grid_of<1>(a), kBlock, stream, a);
}

template <class T, int n>
__global__ void scale_row(ScaleByPosition a) {
  const int64_t r = blockIdx.x, j = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n;
  if (j >= a.width) return;
  const float factor = position_factor<T>(a.position[r], a.period, a.slope);
  if (factor == 1) return;  // all of a text that is no longer than the period
  T* at = static_cast<T*>(a.x) + r * a.stride + j;
  const Pack<T, n> x = load_pack<n>(at);
  float scaled[n];
  for (int i = 0; i < n; ++i) scaled[i] = to_float(x.at[i]) * factor;
  store_rounded(at, scaled);
}

}  // namespace

void rope(const Rope& args, StreamView stream) {
  Rope a = args;
  a.dim = args.turned();
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    if (a.neighbours) return rotate_as<T, true>(a, stream);
    rotate_as<T, false>(a, stream);
  });
}

void scale_by_position(const ScaleByPosition& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    const auto grid = [&](int64_t n) {
      return dim3(static_cast<unsigned>(a.rows), blocks_of(a.width, kBlock * n));
    };
    if (a.width % kPack<T> == 0 && a.stride % kPack<T> == 0 && aligned(16, a.x)) {
      return launch(scale_row<T, kPack<T>>, grid(kPack<T>), kBlock, stream, a);
    }
    launch(scale_row<T, 1>, grid(1), kBlock, stream, a);
  });
}

}  // namespace lm::gpu
