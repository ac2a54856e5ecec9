// LayerNorm on the GPU: a warp per row up to 1024 elements, a block above, three passes of which all but the
// first find the row in a cache. A thread has the same elements of a row whether it reads them as packs or
// one by one, so that the mean has the same bits wherever a row is added up. The gradients of weight and bias
// have a fixed order, rows of a block of 64 one after the other.
#include "kernels/block_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

// What a thread reads of a row at a time.
template <class T>
using Part = Pack<T, kPack<T>>;

// `left`: elements from there to the end of the row; those behind it are 0.
template <bool kPacked, class T>
__device__ __forceinline__ Part<T> load_part(const T* from, int64_t left) {
  if constexpr (kPacked) {
    return load_pack<kPack<T>>(from);
  } else {
    Part<T> part{};
    for (int i = 0; i < kPack<T>; ++i) {
      if (i < left) part.at[i] = from[i];
    }
    return part;
  }
}
template <bool kPacked, class T>
__device__ __forceinline__ void store_part(T* to, const float (&x)[kPack<T>], int64_t left) {
  if constexpr (kPacked) {
    store_rounded(to, x);
  } else {
    for (int i = 0; i < kPack<T>; ++i) {
      if (i < left) to[i] = round_to<T>(x[i]);
    }
  }
}

// Calls body(j, left) for the parts of a row that a thread has, j the first element of each.
template <class T, int kLanes, class Body>
__device__ __forceinline__ void each_part(int64_t width, const Body& body) {
  const int first = static_cast<int>(threadIdx.x % kLanes) * kPack<T>;
  for (int64_t j = first; j < width; j += kLanes * kPack<T>) body(j, width - j);
}

// Every thread that has a part of the row calls it, and the others of its warp or block.
template <class T, bool kPacked, int kLanes>
__device__ __forceinline__ float row_mean(const T* x, int64_t width) {
  float total = 0;
  each_part<T, kLanes>(width, [&](int64_t j, int64_t left) {
    const Part<T> v = load_part<kPacked>(x + j, left);
    for (int i = 0; i < kPack<T>; ++i) total += to_float(v.at[i]);
  });
  return vector_sum<kLanes>(total) / static_cast<float>(width);
}

__device__ __forceinline__ float factor_of(float weight, bool offset) {
  return offset ? norm_factor<WeightForm::kOffset>(weight) : weight;
}

template <class T, bool kPacked, int kLanes>
__global__ void forward(LayerNormForward a) {
  constexpr int n = kPack<T>;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (r >= a.rows) return;  // whole warps only: a block has one row when kLanes = kThreads
  const T* x = static_cast<const T*>(a.x) + r * a.x_stride;
  const T *weight = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias);
  T* out = static_cast<T*>(a.out) + r * a.out_stride;
  if (a.residual != nullptr) {
    const T* residual = static_cast<const T*>(a.residual) + r * a.width;
    T* sum = static_cast<T*>(a.sum) + r * a.width;
    each_part<T, kLanes>(a.width, [&](int64_t j, int64_t left) {
      const Part<T> v = load_part<kPacked>(x + j, left), extra = load_part<kPacked>(residual + j, left);
      float both[n];
      for (int i = 0; i < n; ++i) both[i] = to_float(v.at[i]) + to_float(extra.at[i]);
      store_part<kPacked>(sum + j, both, left);
    });
    x = sum;  // each thread reads back only what it wrote
  }
  const float mean = row_mean<T, kPacked, kLanes>(x, a.width);
  float squares = 0;
  each_part<T, kLanes>(a.width, [&](int64_t j, int64_t left) {
    const Part<T> v = load_part<kPacked>(x + j, left);
    for (int i = 0; i < n; ++i) {
      const float d = to_float(v.at[i]) - mean;
      if (kPacked || i < left) squares += d * d;
    }
  });
  const float rstd = 1.f / sqrtf(vector_sum<kLanes>(squares) / static_cast<float>(a.width) + a.eps);
  if (a.rstd != nullptr && threadIdx.x % kLanes == 0) a.rstd[r] = rstd;
  each_part<T, kLanes>(a.width, [&](int64_t j, int64_t left) {
    const Part<T> v = load_part<kPacked>(x + j, left), w = load_part<kPacked>(weight + j, left);
    Part<T> b{};
    if (bias != nullptr) b = load_part<kPacked>(bias + j, left);
    float y[n];
    for (int i = 0; i < n; ++i) {
      y[i] = factor_of(to_float(w.at[i]), a.offset) * ((to_float(v.at[i]) - mean) * rstd);
      if (bias != nullptr) y[i] += to_float(b.at[i]);
    }
    store_part<kPacked>(out + j, y, left);
  });
}

template <class T, bool kPacked, int kLanes>
__global__ void backward(LayerNormBackward a) {
  constexpr int n = kPack<T>;
  const int64_t r = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (r >= a.rows) return;
  const T* dy = static_cast<const T*>(a.dy) + r * a.dy_stride;
  const T* x = static_cast<const T*>(a.x) + r * a.x_stride;
  const T* weight = static_cast<const T*>(a.weight);
  const T* dresidual = a.dresidual != nullptr ? static_cast<const T*>(a.dresidual) + r * a.width : nullptr;
  T* dx = static_cast<T*>(a.dx) + r * a.dx_stride;
  const float rstd = a.rstd[r], mean = row_mean<T, kPacked, kLanes>(x, a.width);
  float gradients = 0, products = 0;
  each_part<T, kLanes>(a.width, [&](int64_t j, int64_t left) {
    const Part<T> v = load_part<kPacked>(x + j, left), w = load_part<kPacked>(weight + j, left),
                  gradient = load_part<kPacked>(dy + j, left);  // 0 behind the row
    for (int i = 0; i < n; ++i) {
      const float d = factor_of(to_float(w.at[i]), a.offset) * to_float(gradient.at[i]);
      gradients += d;
      products += d * ((to_float(v.at[i]) - mean) * rstd);
    }
  });
  const auto width = static_cast<float>(a.width);
  const float gradient_mean = vector_sum<kLanes>(gradients) / width;
  const float product_mean = vector_sum<kLanes>(products) / width;
  each_part<T, kLanes>(a.width, [&](int64_t j, int64_t left) {
    const Part<T> v = load_part<kPacked>(x + j, left), w = load_part<kPacked>(weight + j, left),
                  gradient = load_part<kPacked>(dy + j, left);
    Part<T> extra{};
    if (dresidual != nullptr) extra = load_part<kPacked>(dresidual + j, left);
    float out[n];
    for (int i = 0; i < n; ++i) {
      const float d = factor_of(to_float(w.at[i]), a.offset) * to_float(gradient.at[i]);
      const float own =
          layer_norm_gradient((to_float(v.at[i]) - mean) * rstd, d, gradient_mean, product_mean, rstd);
      out[i] = dresidual != nullptr ? to_float(extra.at[i]) + own : own;
    }
    store_part<kPacked>(dx + j, out, left);
  });
}

// partial[b, j] of the weight's gradient and, behind the last b, of the bias's: rows b * 64 ... in order. The
// rows' means come first; a thread then has n columns. Blocks that share rows each find the means, which
// keeps them out of memory, and so wide rows have few such blocks.
template <class T, bool kPacked, int kLanes>
__global__ void gradient_partials(LayerNormBackward a) {
  constexpr int n = kPacked && kLanes == kThreads ? kPack<T> : 1;
  __shared__ float means[kRowBlock];
  const int64_t block = blockIdx.x, blocks = gridDim.x, begin = block * kRowBlock;
  const int rows = static_cast<int>(min(a.rows - begin, kRowBlock));
  const T* x = static_cast<const T*>(a.x) + begin * a.x_stride;
  for (int r = static_cast<int>(threadIdx.x) / kLanes; r < rows; r += kThreads / kLanes) {
    const float mean = row_mean<T, kPacked, kLanes>(x + r * a.x_stride, a.width);
    if (threadIdx.x % kLanes == 0) means[r] = mean;
  }
  __syncthreads();
  const int64_t j = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n;
  if (j >= a.width) return;
  const T* dy = static_cast<const T*>(a.dy) + begin * a.dy_stride;
  float weight[n]{}, bias[n]{};
#pragma unroll 8  // loads at a time
  for (int r = 0; r < rows; ++r) {
    const Pack<T, n> gradient = load_pack<n>(dy + r * a.dy_stride + j),
                     v = load_pack<n>(x + r * a.x_stride + j);
    const float rstd = a.rstd[begin + r];
    for (int i = 0; i < n; ++i) {
      weight[i] += to_float(gradient.at[i]) * ((to_float(v.at[i]) - means[r]) * rstd);
      bias[i] += to_float(gradient.at[i]);
    }
  }
  for (int i = 0; i < n; ++i) {
    if (a.dweight != nullptr) a.partial[block * a.width + j + i] = weight[i];
    if (a.dbias != nullptr) a.partial[(blocks + block) * a.width + j + i] = bias[i];
  }
}

// Calls body(kPacked, kLanes) as constants.
template <class Body>
void with_row(bool packed, int64_t width, const Body& body) {
  const auto with_lanes = [&](auto constant) {
    if (width <= kWarpWidth) return body(constant, std::integral_constant<int, 32>{});
    body(constant, std::integral_constant<int, kThreads>{});
  };
  if (packed) return with_lanes(std::true_type{});
  with_lanes(std::false_type{});
}

template <class T>
bool packable(int64_t width, int64_t in_stride, int64_t out_stride) {
  return width % kPack<T> == 0 && in_stride % kPack<T> == 0 && out_stride % kPack<T> == 0;
}

template <class T, bool kPacked, int kLanes>
void launch_partials(const LayerNormBackward& a, StreamView stream) {
  const int64_t columns = kThreads * (kPacked && kLanes == kThreads ? kPack<T> : 1);
  const unsigned blocks = blocks_of(a.rows, kRowBlock);
  launch(gradient_partials<T, kPacked, kLanes>, dim3(blocks, blocks_of(a.width, columns)), kThreads, stream,
         a);
  const auto finish = [&](const float* partial, float* sums) {
    launch(sum_partials, blocks_of(a.width, 128), 128, stream, partial, int64_t{blocks}, a.width, sums);
  };
  if (a.dweight != nullptr) finish(a.partial, a.dweight);
  if (a.dbias != nullptr) finish(a.partial + blocks * a.width, a.dbias);
}

}  // namespace

void layer_norm_forward(const LayerNormForward& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    const bool pack = packable<T>(a.width, a.x_stride, a.out_stride) &&
                      aligned(16, a.x, a.residual, a.weight, a.bias, a.sum, a.out);
    with_row(pack, a.width, [&](auto packed, auto lanes) {
      constexpr int kLanes = decltype(lanes)::value;
      launch(forward<T, decltype(packed)::value, kLanes>, blocks_of(a.rows, kThreads / kLanes), kThreads,
             stream, a);
    });
  });
}

void layer_norm_backward(const LayerNormBackward& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    const bool pack = packable<T>(a.width, a.x_stride, a.dx_stride) && a.dy_stride % kPack<T> == 0 &&
                      aligned(16, a.dy, a.x, a.weight, a.dresidual, a.dx);
    with_row(pack, a.width, [&](auto packed, auto lanes) {
      constexpr bool kPacked = decltype(packed)::value;
      constexpr int kLanes = decltype(lanes)::value;
      // First, because dx may be dy.
      if (a.dweight != nullptr || a.dbias != nullptr) launch_partials<T, kPacked, kLanes>(a, stream);
      launch(backward<T, kPacked, kLanes>, blocks_of(a.rows, kThreads / kLanes), kThreads, stream, a);
    });
  });
}

}  // namespace lm::gpu
