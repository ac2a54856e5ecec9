// RMSNorm on the GPU: a warp per vector up to 1024 elements (the heads of q and k), a block above. The
// weight's gradient is a pass of its own, a thread per column and block of 64 rows, so that its order is
// fixed.
#include "kernels/block_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

constexpr int64_t kWarpWidth = 1024;

// The sum over the kLanes threads that share a vector (a warp or the block).
template <int kLanes>
__device__ __forceinline__ float vector_sum(float x) {
  if constexpr (kLanes == 32) return warp_sum(x);
  return block_sum(x);
}

template <class T, int n, int kLanes>
__global__ void forward(RmsNormForward a) {
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (vector >= a.rows * a.groups) return;  // whole warps only: a block has one vector when kLanes = kThreads
  const int64_t r = vector / a.groups, g = vector % a.groups;
  const int first = static_cast<int>(threadIdx.x % kLanes) * n;
  const T* x = static_cast<const T*>(a.x) + r * a.x_stride + g * a.width;
  const T* weight = static_cast<const T*>(a.weight);
  T* out = static_cast<T*>(a.out) + r * a.out_stride + g * a.width;
  float squares = 0;
  if (a.residual != nullptr) {
    const T* residual = static_cast<const T*>(a.residual) + r * a.width;
    T* sum = static_cast<T*>(a.sum) + r * a.width;
    for (int64_t j = first; j < a.width; j += kLanes * n) {
      Pack<T, n> v = load_pack<n>(x + j);
      const Pack<T, n> extra = load_pack<n>(residual + j);
      for (int i = 0; i < n; ++i) {
        v.at[i] = round_to<T>(to_float(v.at[i]) + to_float(extra.at[i]));
        squares += to_float(v.at[i]) * to_float(v.at[i]);
      }
      store_pack<n>(sum + j, v);
    }
    x = sum;  // each thread reads back only what it wrote
  } else {
    for (int64_t j = first; j < a.width; j += kLanes * n) {
      const Pack<T, n> v = load_pack<n>(x + j);
      for (int i = 0; i < n; ++i) squares += to_float(v.at[i]) * to_float(v.at[i]);
    }
  }
  const float mean = vector_sum<kLanes>(squares) / static_cast<float>(a.width);
  const float rstd = 1.f / sqrtf(mean + a.eps);
  if (a.rstd != nullptr && first == 0) a.rstd[vector] = rstd;
  for (int64_t j = first; j < a.width; j += kLanes * n) {
    Pack<T, n> v = load_pack<n>(x + j);
    const Pack<T, n> w = load_pack<n>(weight + j);
    for (int i = 0; i < n; ++i) {
      v.at[i] = round_to<T>(rms_norm_output<T>(to_float(v.at[i]), rstd, to_float(w.at[i])));
    }
    store_pack<n>(out + j, v);
  }
}

template <class T, int n, int kLanes>
__global__ void backward(RmsNormBackward a) {
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (vector >= a.rows * a.groups) return;
  const int64_t r = vector / a.groups, g = vector % a.groups;
  const int first = static_cast<int>(threadIdx.x % kLanes) * n;
  const T* dy = static_cast<const T*>(a.dy) + r * a.dy_stride + g * a.width;
  const T* x = static_cast<const T*>(a.x) + r * a.x_stride + g * a.width;
  const T* weight = static_cast<const T*>(a.weight);
  const T* dresidual = a.dresidual != nullptr ? static_cast<const T*>(a.dresidual) + r * a.width : nullptr;
  T* dx = static_cast<T*>(a.dx) + r * a.dx_stride + g * a.width;
  const float rstd = a.rstd[vector];
  float dots = 0;
  for (int64_t j = first; j < a.width; j += kLanes * n) {
    const Pack<T, n> gradient = load_pack<n>(dy + j), v = load_pack<n>(x + j), w = load_pack<n>(weight + j);
    for (int i = 0; i < n; ++i) {
      dots += to_float(w.at[i]) * to_float(gradient.at[i]) * (to_float(v.at[i]) * rstd);
    }
  }
  const float mean = vector_sum<kLanes>(dots) / static_cast<float>(a.width);
  for (int64_t j = first; j < a.width; j += kLanes * n) {
    const Pack<T, n> gradient = load_pack<n>(dy + j), v = load_pack<n>(x + j), w = load_pack<n>(weight + j);
    Pack<T, n> d{};
    if (dresidual != nullptr) d = load_pack<n>(dresidual + j);
    for (int i = 0; i < n; ++i) {
      const float own = rms_norm_gradient(to_float(v.at[i]) * rstd, to_float(gradient.at[i]),
                                          to_float(w.at[i]), mean, rstd);
      d.at[i] = round_to<T>(dresidual != nullptr ? to_float(d.at[i]) + own : own);
    }
    store_pack<n>(dx + j, d);
  }
}

// partial[b, j]: rows b * 64 ... in order, the groups of a row in order.
template <class T>
__global__ void weight_partials(RmsNormBackward a) {
  const int64_t j = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x, block = blockIdx.x;
  if (j >= a.width) return;
  const int64_t end = min(a.rows, (block + 1) * kRowBlock);
  float sum = 0;
  for (int64_t r = block * kRowBlock; r < end; ++r) {
    const T* dy = static_cast<const T*>(a.dy) + r * a.dy_stride + j;
    const T* x = static_cast<const T*>(a.x) + r * a.x_stride + j;
    for (int64_t g = 0; g < a.groups; ++g) {
      const float normal = to_float(x[g * a.width]) * a.rstd[r * a.groups + g];
      sum += to_float(dy[g * a.width]) * round_as<T>(normal);
    }
  }
  a.partial[block * a.width + j] = sum;
}

template <class T, class Arguments>
bool packable(const Arguments& a, int64_t in_stride, int64_t out_stride) {
  return a.width % kPack<T> == 0 && in_stride % kPack<T> == 0 && out_stride % kPack<T> == 0;
}

}  // namespace

void rms_norm_forward(const RmsNormForward& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    const int64_t vectors = a.rows * a.groups;
    const bool pack =
        packable<T>(a, a.x_stride, a.out_stride) && aligned(16, a.x, a.residual, a.weight, a.sum, a.out);
    const bool warp = a.width <= kWarpWidth;
    const unsigned grid = blocks_of(vectors, warp ? kThreads / 32 : 1);
    if (pack && warp) return launch(forward<T, kPack<T>, 32>, grid, kThreads, stream, a);
    if (pack) return launch(forward<T, kPack<T>, kThreads>, grid, kThreads, stream, a);
    if (warp) return launch(forward<T, 1, 32>, grid, kThreads, stream, a);
    launch(forward<T, 1, kThreads>, grid, kThreads, stream, a);
  });
}

void rms_norm_backward(const RmsNormBackward& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    if (a.dweight != nullptr) {  // first, because dx may be dy
      const int64_t blocks = (a.rows + kRowBlock - 1) / kRowBlock;
      launch(weight_partials<T>, dim3(static_cast<unsigned>(blocks), blocks_of(a.width, 128)), 128, stream,
             a);
      launch(sum_partials, blocks_of(a.width, 128), 128, stream, static_cast<const float*>(a.partial), blocks,
             a.width, a.dweight);
    }
    const int64_t vectors = a.rows * a.groups;
    const bool pack = packable<T>(a, a.x_stride, a.dx_stride) && a.dy_stride % kPack<T> == 0 &&
                      aligned(16, a.dy, a.x, a.weight, a.dresidual, a.dx);
    const bool warp = a.width <= kWarpWidth;
    const unsigned grid = blocks_of(vectors, warp ? kThreads / 32 : 1);
    if (pack && warp) return launch(backward<T, kPack<T>, 32>, grid, kThreads, stream, a);
    if (pack) return launch(backward<T, kPack<T>, kThreads>, grid, kThreads, stream, a);
    if (warp) return launch(backward<T, 1, 32>, grid, kThreads, stream, a);
    launch(backward<T, 1, kThreads>, grid, kThreads, stream, a);
  });
}

}  // namespace lm::gpu
