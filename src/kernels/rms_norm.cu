// RMSNorm on the GPU: a warp per vector up to 1024 elements (the heads of q and k), a block above. The
// weight's gradient has a fixed order, rows of a block of 64 one after the other. Where there are enough such
// blocks for a GPU one pass makes both gradients, else the weight's is a pass of its own.
#include "kernels/block_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

// n neighbours of the weight. Where there is none they are 1, in kernels of the form that rounds once.
template <int n, WeightForm kForm, class T>
__device__ __forceinline__ Pack<T, n> load_weight(const void* weight, int64_t j) {
  if constexpr (kForm == WeightForm::kBeforeRounding) {
    if (weight == nullptr) {
      Pack<T, n> ones;
      for (int i = 0; i < n; ++i) ones.at[i] = round_to<T>(1.f);
      return ones;
    }
  }
  return load_pack<n>(static_cast<const T*>(weight) + j);
}
WeightForm form_of(const void* weight, WeightForm form) {
  return weight == nullptr ? WeightForm::kBeforeRounding : form;
}

template <class T, int n, int kLanes, WeightForm kForm>
__global__ void forward(RmsNormForward a) {
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (vector >= a.rows * a.groups) return;  // whole warps only: a block has one vector when kLanes = kThreads
  const int64_t r = vector / a.groups, g = vector % a.groups;
  const int first = static_cast<int>(threadIdx.x % kLanes) * n;
  const T* x = static_cast<const T*>(a.x) + r * a.x_stride + g * a.width;
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
  const auto output = [&](int64_t j, float(&y)[n]) {
    const Pack<T, n> v = load_pack<n>(x + j), w = load_weight<n, kForm, T>(a.weight, j);
    for (int i = 0; i < n; ++i) {
      y[i] = norm_factor<kForm>(to_float(w.at[i])) * norm_input<T, kForm>(to_float(v.at[i]) * rstd);
    }
  };
  float y[n];
  if (a.add_to == nullptr) {
    for (int64_t j = first; j < a.width; j += kLanes * n) {
      output(j, y);
      store_rounded(out + j, y);
    }
    return;
  }
  const T* add_to = static_cast<const T*>(a.add_to) + r * a.width;
  const bool scaled = a.factor != 1;
  for (int64_t j = first; j < a.width; j += kLanes * n) {
    const Pack<T, n> to = load_pack<n>(add_to + j);
    output(j, y);
    for (int i = 0; i < n; ++i) y[i] = norm_added<T>(to_float(to.at[i]), y[i], a.factor, scaled);
    store_rounded(out + j, y);
  }
}

// What a row's second turn needs again: kPacks packs of each thread's gradients and inputs stay in registers,
// as forward's second turn finds its row in the cache. 0: rows too long for that are read twice.
template <class T, int n, int kPacks>
struct KeptRow {
  static constexpr bool kKept = kPacks > 0;
  Pack<T, n> dy[kKept ? kPacks : 1], x[kKept ? kPacks : 1];
};

template <class T, int n, int kLanes, int kPacks, WeightForm kForm>
__global__ void backward(RmsNormBackward a) {
  const int64_t vector = static_cast<int64_t>(blockIdx.x) * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (vector >= a.rows * a.groups) return;
  const int64_t r = vector / a.groups, g = vector % a.groups;
  const int first = static_cast<int>(threadIdx.x % kLanes) * n;
  const T* dy = static_cast<const T*>(a.dy) + r * a.dy_stride + g * a.width;
  const T* x = static_cast<const T*>(a.x) + r * a.x_stride + g * a.width;
  const T* dresidual = a.dresidual != nullptr ? static_cast<const T*>(a.dresidual) + r * a.width : nullptr;
  T* dx = static_cast<T*>(a.dx) + r * a.dx_stride + g * a.width;
  const float rstd = a.rstd[vector];
  KeptRow<T, n, kPacks> row;
  // Packs of this thread in order: the index is known to the compiler where the row is kept.
  const auto each_pack = [&](auto work) {
    if constexpr (kPacks > 0) {
#pragma unroll
      for (int p = 0; p < kPacks; ++p) {
        const int64_t j = first + int64_t{p} * kLanes * n;
        if (j < a.width) work(j, p);
      }
    } else {
      for (int64_t j = first; j < a.width; j += kLanes * n) work(j, 0);
    }
  };
  float dots = 0;
  each_pack([&](int64_t j, int p) {
    row.dy[p] = load_pack<n>(dy + j), row.x[p] = load_pack<n>(x + j);
    const Pack<T, n> w = load_weight<n, kForm, T>(a.weight, j);
    for (int i = 0; i < n; ++i) {
      dots += norm_factor<kForm>(to_float(w.at[i])) * to_float(row.dy[p].at[i]) *
              (to_float(row.x[p].at[i]) * rstd);
    }
  });
  const float mean = vector_sum<kLanes>(dots) / static_cast<float>(a.width);
  each_pack([&](int64_t j, int p) {
    if constexpr (kPacks == 0) row.dy[p] = load_pack<n>(dy + j), row.x[p] = load_pack<n>(x + j);
    const Pack<T, n> w = load_weight<n, kForm, T>(a.weight, j);
    Pack<T, n> d{};
    if (dresidual != nullptr) d = load_pack<n>(dresidual + j);
    float sum[n];
    for (int i = 0; i < n; ++i) {
      const float own = rms_norm_gradient(to_float(row.x[p].at[i]) * rstd, to_float(row.dy[p].at[i]),
                                          norm_factor<kForm>(to_float(w.at[i])), mean, rstd);
      sum[i] = dresidual != nullptr ? to_float(d.at[i]) + own : own;
    }
    store_rounded(dx + j, sum);
  });
}

// partial[b, j]: rows b * 64 ... in order, the groups of a row in order. A thread has n columns and asks for
// kAhead vectors at a time: one after the other would wait for memory as often as there are rows.
template <class T, int n, WeightForm kForm>
__global__ void weight_partials(RmsNormBackward a) {
  constexpr int kAhead = n == 1 ? 16 : 8;
  const int64_t j = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n, block = blockIdx.x;
  if (j >= a.width) return;
  const int64_t begin = block * kRowBlock, rows = min(a.rows - begin, kRowBlock);
  const T* dy = static_cast<const T*>(a.dy) + begin * a.dy_stride + j;
  const T* x = static_cast<const T*>(a.x) + begin * a.x_stride + j;
  const float* rstd = a.rstd + begin * a.groups;
  float sum[n]{};
  int64_t g = 0;
  const auto add = [&](auto vectors) {
    constexpr int kVectors = decltype(vectors)::value;
    Loaded<T, n> gradient[kVectors], input[kVectors];
    float scale[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      gradient[v] = load<n>(dy), input[v] = load<n>(x), scale[v] = *rstd++;
      const bool last = ++g == a.groups;
      dy += last ? a.dy_stride - (a.groups - 1) * a.width : a.width;
      x += last ? a.x_stride - (a.groups - 1) * a.width : a.width;
      g = last ? 0 : g;
    }
    for (int v = 0; v < kVectors; ++v) {
      float d[n], value[n];
      unpack<T>(gradient[v], d), unpack<T>(input[v], value);
      for (int i = 0; i < n; ++i) sum[i] += d[i] * norm_input<T, kForm>(value[i] * scale[v]);
    }
  };
  int64_t left = rows * a.groups;
  for (; left >= kAhead; left -= kAhead) add(std::integral_constant<int, kAhead>{});
  for (; left > 0; --left) add(std::integral_constant<int, 1>{});
  for (int i = 0; i < n; ++i) a.partial[block * a.width + j + i] = sum[i];
}

// ---- both gradients in one pass

// Warps of a block give the sums of their threads to the block by turns, so that one barrier is enough.
constexpr int kWarpSums = 32;
__device__ __forceinline__ float* warp_sums(int turn) {
  alignas(16) __shared__ float sums[2 * kWarpSums];
  return sums + turn * kWarpSums;
}
// x[q] becomes its sum over the block, for every thread.
template <int kRows, int kBlock>
__device__ __forceinline__ void block_sums(float (&x)[kRows], int turn) {
  constexpr int kWarps = kBlock / 32;
  static_assert(kRows * kWarps <= kWarpSums);
  float* const sums = warp_sums(turn);
  for (int q = 0; q < kRows; ++q) {
    x[q] = warp_sum(x[q]);
    if (threadIdx.x % 32 == 0) sums[q * kWarps + threadIdx.x / 32] = x[q];
  }
  __syncthreads();
  for (int q = 0; q < kRows; ++q) {
    x[q] = 0;
    for (int w = 0; w < kWarps; ++w) x[q] += sums[q * kWarps + w];
  }
}

// A thread's part of kRows rows: packs of kEach columns.
template <class T, int n, int kRows, int kEach>
struct RowPacks {
  Loaded<T, n> dy[kRows][kEach], x[kRows][kEach], dresidual[kRows][kEach];
  float rstd[kRows];
};

// A block has 64 rows, the sums of its columns in registers. While it works on kRows of them the next ones
// are on their way: 48 KB at 4096 columns of bf16, which is what a multiprocessor's share of 4.1 TB/s needs.
template <class T, int n, int kRows, int kEach, int kBlock, WeightForm kForm>
__global__ void __launch_bounds__(kBlock) backward_once(RmsNormBackward a) {
  const int64_t begin = blockIdx.x * kRowBlock, end = min(a.rows, begin + kRowBlock);
  Loaded<T, n> weight[kEach]{};
  const auto column = [](int e) { return (int64_t{threadIdx.x} + e * kBlock) * n; };
  for (int e = 0; e < kEach; ++e) {
    if (column(e) < a.width) weight[e] = load<n>(static_cast<const T*>(a.weight) + column(e));
  }
  RowPacks<T, n, kRows, kEach> now{}, next{};  // zeros where a thread has no column
  const auto ask_for = [&](auto& rows, int64_t first) {
    for (int q = 0; q < kRows; ++q) {
      const int64_t r = first + q;
      if (r >= end) return;
      for (int e = 0; e < kEach; ++e) {
        if (column(e) >= a.width) continue;
        rows.dy[q][e] = load<n>(static_cast<const T*>(a.dy) + r * a.dy_stride + column(e));
        rows.x[q][e] = load<n>(static_cast<const T*>(a.x) + r * a.x_stride + column(e));
        rows.dresidual[q][e] = load<n>(static_cast<const T*>(a.dresidual) + r * a.width + column(e));
      }
      rows.rstd[q] = a.rstd[r];
    }
  };
  float sums[kEach][n]{};
  ask_for(now, begin);
  for (int64_t first = begin, turn = 0; first < end; first += kRows, turn ^= 1) {
    ask_for(next, first + kRows);
    float mean[kRows]{}, dy[n], x[n], w[n], d[n];
    for (int q = 0; q < kRows; ++q) {
      for (int e = 0; e < kEach; ++e) {
        unpack<T>(now.dy[q][e], dy), unpack<T>(now.x[q][e], x), unpack<T>(weight[e], w);
        for (int i = 0; i < n; ++i) mean[q] += norm_factor<kForm>(w[i]) * dy[i] * (x[i] * now.rstd[q]);
      }
    }
    block_sums<kRows, kBlock>(mean, static_cast<int>(turn));
    for (int q = 0; q < kRows; ++q) {
      if (first + q >= end) break;
      mean[q] /= static_cast<float>(a.width);
      for (int e = 0; e < kEach; ++e) {
        if (column(e) >= a.width) continue;
        unpack<T>(now.dy[q][e], dy), unpack<T>(now.x[q][e], x), unpack<T>(weight[e], w);
        unpack<T>(now.dresidual[q][e], d);
        for (int i = 0; i < n; ++i) {
          const float normal = x[i] * now.rstd[q];
          sums[e][i] += dy[i] * norm_input<T, kForm>(normal);
          d[i] += rms_norm_gradient(normal, dy[i], norm_factor<kForm>(w[i]), mean[q], now.rstd[q]);
        }
        store_rounded(static_cast<T*>(a.dx) + (first + q) * a.dx_stride + column(e), d);
      }
    }
    now = next;
  }
  for (int e = 0; e < kEach; ++e) {
    if (column(e) >= a.width) continue;
    for (int i = 0; i < n; ++i) a.partial[blockIdx.x * a.width + column(e) + i] = sums[e][i];
  }
}

// Whether it was launched. Fewer blocks than 64 leave half of a large GPU idle, and the second of two passes
// over so few rows finds most of them in L2.
template <class T, WeightForm kForm>
bool launch_backward_once(const RmsNormBackward& a, unsigned blocks, StreamView stream) {
  constexpr int n = kPack<T>;
  const int64_t packs = a.width / n;
  if (blocks < 64 || a.groups != 1 || a.width <= kWarpWidth || packs > 1024) return false;
  if (a.dresidual == nullptr) return false;  // the last norm's alone
  if (a.weight == nullptr) return false;     // it would have no gradient
  if (packs <= 256) {
    launch(backward_once<T, n, 4, 1, 256, kForm>, blocks, 256, stream, a);
  } else if (packs <= 512) {
    launch(backward_once<T, n, 2, 1, 512, kForm>, blocks, 512, stream, a);
  } else {
    launch(backward_once<T, n, 1, 2, 512, kForm>, blocks, 512, stream, a);
  }
  return true;
}

template <class T, class Arguments>
bool packable(const Arguments& a, int64_t in_stride, int64_t out_stride) {
  return a.width % kPack<T> == 0 && in_stride % kPack<T> == 0 && out_stride % kPack<T> == 0;
}

template <class T, WeightForm kForm>
void launch_forward(const RmsNormForward& a, StreamView stream) {
  const int64_t vectors = a.rows * a.groups;
  const bool pack = packable<T>(a, a.x_stride, a.out_stride) &&
                    aligned(16, a.x, a.residual, a.weight, a.sum, a.add_to, a.out);
  const bool warp = a.width <= kWarpWidth;
  const unsigned grid = blocks_of(vectors, warp ? kThreads / 32 : 1);
  if (pack && warp) return launch(forward<T, kPack<T>, 32, kForm>, grid, kThreads, stream, a);
  if (pack) return launch(forward<T, kPack<T>, kThreads, kForm>, grid, kThreads, stream, a);
  if (warp) return launch(forward<T, 1, 32, kForm>, grid, kThreads, stream, a);
  launch(forward<T, 1, kThreads, kForm>, grid, kThreads, stream, a);
}

template <class T, WeightForm kForm>
void launch_backward(const RmsNormBackward& a, StreamView stream) {
  const bool pack = packable<T>(a, a.x_stride, a.dx_stride) && a.dy_stride % kPack<T> == 0 &&
                    aligned(16, a.dy, a.x, a.weight, a.dresidual, a.dx);
  if (a.dweight != nullptr) {  // first, because dx may be dy
    const unsigned blocks = blocks_of(a.rows, kRowBlock);
    const bool once = pack && launch_backward_once<T, kForm>(a, blocks, stream);
    // Of the weight's gradient the forms differ only in where n is rounded.
    constexpr WeightForm kInput = kForm == WeightForm::kAfterRounding ? kForm : WeightForm::kBeforeRounding;
    // A vector of 128 elements has one thread per element rather than 16 threads.
    if (!once && pack && a.width > kWarpWidth) {
      launch(weight_partials<T, kPack<T>, kInput>, dim3(blocks, blocks_of(a.width, 128 * kPack<T>)), 128,
             stream, a);
    } else if (!once) {
      launch(weight_partials<T, 1, kInput>, dim3(blocks, blocks_of(a.width, 128)), 128, stream, a);
    }
    launch(sum_partials, blocks_of(a.width, 128), 128, stream, static_cast<const float*>(a.partial),
           int64_t{blocks}, a.width, a.dweight);
    if (once) return;
  }
  const int64_t vectors = a.rows * a.groups;
  const bool warp = a.width <= kWarpWidth;
  const unsigned grid = blocks_of(vectors, warp ? kThreads / 32 : 1);
  constexpr int n = kPack<T>;
  const int64_t step = int64_t{warp ? 32 : kThreads} * n, packs = (a.width + step - 1) / step;
  if (pack && warp) {
    if (packs <= 2) return launch(backward<T, n, 32, 2, kForm>, grid, kThreads, stream, a);
    return launch(backward<T, n, 32, kWarpWidth / (32 * n), kForm>, grid, kThreads, stream, a);
  }
  if (pack && packs <= 2) return launch(backward<T, n, kThreads, 2, kForm>, grid, kThreads, stream, a);
  if (pack && packs <= 4) return launch(backward<T, n, kThreads, 4, kForm>, grid, kThreads, stream, a);
  if (pack) return launch(backward<T, n, kThreads, 0, kForm>, grid, kThreads, stream, a);
  if (warp) return launch(backward<T, 1, 32, 0, kForm>, grid, kThreads, stream, a);
  launch(backward<T, 1, kThreads, 0, kForm>, grid, kThreads, stream, a);
}

}  // namespace

void rms_norm_forward(const RmsNormForward& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    with_form(form_of(a.weight, a.form),
              [&](auto form) { launch_forward<decltype(t), decltype(form)::value>(a, stream); });
  });
}

void rms_norm_backward(const RmsNormBackward& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    with_form(form_of(a.weight, a.form),
              [&](auto form) { launch_backward<decltype(t), decltype(form)::value>(a, stream); });
  });
}

}  // namespace lm::gpu
