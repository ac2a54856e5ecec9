// Products of a mixture's experts on the GPU: one launch for many experts, whose rows are counted on the
// device. bf16 and fp16 on tensor cores (GPUs before 8.0 have none for bf16), fp32 by fused operations.
//
// A library's product per expert would need its number of rows on the host: a wait in every layer; or all T k
// rows for each of the E experts, E / k times the work of a dense layer. Here a block makes one tile of 64
// rows and 128 columns. Of T k rows in E experts half a tile each is empty on average: 32 E rows, 12 % of
// 32768 rows and 128 experts, and blocks of tiles that are not there end after reading `start`.
//
// For a step of depth 32 a block reads (64 + 128) 32 elements and does 2 * 64 * 128 * 32 FLOP: 43 FLOP for
// each byte of bf16, 21 of fp32, mostly out of the L2 cache, since blocks of one expert follow each other.
// The weights are read from memory once for each tile of rows that misses the cache; kernels/counting.cpp
// prices the launch with all of these bytes. Shared memory: 33 KiB. No block writes what another does, and a
// sum's order is that of its factors' elements: the same input has the same bits.
#include <mma.h>

#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

constexpr int kRows = kExpertTileRows, kColumns = kExpertTileColumns, kDepth = kExpertTileDepth;
// A warp has 32 x 32 of a tile.
constexpr int kWarpTile = 32, kWarpRows = kRows / kWarpTile;
static_assert(kThreads == 32 * kWarpRows * (kColumns / kWarpTile));

// A factor of a tile: `lines` rows (columns) of the tile's product by `depth`. In memory a line is a row, or
// with `turned` a column.
template <class T>
struct Factor {
  const T* data;
  int64_t stride, lines;  // lines that are there
};

// A factor's tile in shared memory, as it lies in memory. 16 bytes more in a row keep threads that read a
// column on different banks.
template <class T, int lines, bool turned>
struct Shape {
  static constexpr int kTileRows = turned ? kDepth : lines, kTileColumns = turned ? lines : kDepth;
  static constexpr int kStride = kTileColumns + kPack<T>;
  static constexpr int kElements = kTileRows * kStride;
  __device__ static int at(int line, int depth) {
    return turned ? depth * kStride + line : line * kStride + depth;
  }
};

constexpr int kSharedBytes = kRows * (kColumns + 4) * 4;
static __device__ __forceinline__ void* shared_memory() {
  alignas(32) __shared__ char memory[kSharedBytes];
  return memory;
}

// Of a block: a tile of each factor; then its sums.
template <class T, bool a_turned, bool b_turned>
union alignas(32) Shared {
  using A = Shape<T, kRows, a_turned>;
  using B = Shape<T, kColumns, b_turned>;
  struct {
    alignas(32) T a[A::kElements];
    alignas(32) T b[B::kElements];
  } factors;
  static constexpr int kSumStride = kColumns + 4;
  float sums[kRows * kSumStride];

  // The block's. One array for all types: the GPU emulator fills all that kernels have before each block.
  __device__ static Shared& of_block() {
    static_assert(sizeof(Shared) <= kSharedBytes);
    return *static_cast<Shared*>(shared_memory());
  }
};

// A thread's part of a factor's next tile, on its way from memory; zeros where there is nothing.
template <class T, int n, class Of>
struct Fetched {
  static constexpr int kAcross = Of::kTileColumns / n, kPacks = Of::kTileRows * kAcross / kThreads;
  static_assert(kPacks * kThreads == Of::kTileRows * kAcross);
  Pack<T, n> pack[kPacks];

  __device__ __forceinline__ void load(const T* from, int64_t stride, int64_t rows, int64_t columns) {
    LM_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      const int p = static_cast<int>(threadIdx.x) + i * kThreads, r = p / kAcross, c = p % kAcross * n;
      pack[i] = r < rows && c < columns ? load_pack<n>(from + r * stride + c) : Pack<T, n>{};
    }
  }
  __device__ __forceinline__ void store(T* to) const {
    LM_UNROLL
    for (int i = 0; i < kPacks; ++i) {
      const int p = static_cast<int>(threadIdx.x) + i * kThreads, r = p / kAcross, c = p % kAcross * n;
      store_pack<n>(to + r * Of::kStride + c, pack[i]);
    }
  }
};
template <bool turned, class T, int n, class Of>
__device__ __forceinline__ void fetch(Fetched<T, n, Of>& to, const Factor<T>& from, int64_t first,
                                      int64_t depth) {
  if constexpr (turned) {
    to.load(from.data + first * from.stride, from.stride, depth - first, from.lines);
  } else {
    to.load(from.data + first, from.stride, from.lines, depth - first);
  }
}

// Whether the device that this is compiled for multiplies T on tensor cores with sums in fp32.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
template <class T>
inline constexpr bool kTensorCores = !std::is_same_v<T, float>;
#else
template <class T>
inline constexpr bool kTensorCores = std::is_same_v<T, Fp16>;
#endif

// The sums of a warp's 32 x 32, without tensor cores: a thread has rows lane / 8 + 4 i and columns
// lane % 8 + 8 j.
template <class T, bool a_turned, bool b_turned, bool tensor_cores>
struct Sums {
  using S = Shared<T, a_turned, b_turned>;
  float at[8][4] = {};

  __device__ __forceinline__ void add(const S& s, int row, int column) {
    const int lane = threadIdx.x % 32;
    for (int d = 0; d < kDepth; ++d) {
      float a[8], b[4];
      LM_UNROLL
      for (int i = 0; i < 8; ++i) a[i] = to_float(s.factors.a[S::A::at(row + lane / 8 + 4 * i, d)]);
      LM_UNROLL
      for (int j = 0; j < 4; ++j) b[j] = to_float(s.factors.b[S::B::at(column + lane % 8 + 8 * j, d)]);
      LM_UNROLL
      for (int i = 0; i < 8; ++i) {
        LM_UNROLL
        for (int j = 0; j < 4; ++j) at[i][j] = fused(a[i], b[j], at[i][j]);
      }
    }
  }
  __device__ __forceinline__ void store(S& s, int row, int column) const {
    const int lane = threadIdx.x % 32;
    LM_UNROLL
    for (int i = 0; i < 8; ++i) {
      LM_UNROLL
      for (int j = 0; j < 4; ++j)
        s.sums[(row + lane / 8 + 4 * i) * S::kSumStride + column + lane % 8 + 8 * j] = at[i][j];
    }
  }
};

// The same on tensor cores, 16 x 16 at a time.
template <class T, bool a_turned, bool b_turned>
struct Sums<T, a_turned, b_turned, true> {
  static constexpr int k = 16;
  using S = Shared<T, a_turned, b_turned>;
  using Element = std::conditional_t<std::is_same_v<T, Bf16>, __nv_bfloat16, __half>;
  using Along = nvcuda::wmma::row_major;
  using Across = nvcuda::wmma::col_major;
  nvcuda::wmma::fragment<nvcuda::wmma::accumulator, k, k, k, float> at[2][2];

  __device__ __forceinline__ Sums() {
    for (auto& row : at) {
      for (auto& sums : row) nvcuda::wmma::fill_fragment(sums, 0.f);
    }
  }
  __device__ __forceinline__ void add(const S& s, int row, int column) {
    LM_UNROLL
    for (int d = 0; d < kDepth; d += k) {
      nvcuda::wmma::fragment<nvcuda::wmma::matrix_a, k, k, k, Element,
                             std::conditional_t<a_turned, Across, Along>>
          a[2];
      nvcuda::wmma::fragment<nvcuda::wmma::matrix_b, k, k, k, Element,
                             std::conditional_t<b_turned, Along, Across>>
          b[2];
      LM_UNROLL
      for (int i = 0; i < 2; ++i) {
        load(a[i], s.factors.a + S::A::at(row + i * k, d), S::A::kStride);
        load(b[i], s.factors.b + S::B::at(column + i * k, d), S::B::kStride);
      }
      LM_UNROLL
      for (int i = 0; i < 2; ++i) {
        LM_UNROLL
        for (int j = 0; j < 2; ++j) nvcuda::wmma::mma_sync(at[i][j], a[i], b[j], at[i][j]);
      }
    }
  }
  __device__ __forceinline__ void store(S& s, int row, int column) const {
    LM_UNROLL
    for (int i = 0; i < 2; ++i) {
      LM_UNROLL
      for (int j = 0; j < 2; ++j)
        nvcuda::wmma::store_matrix_sync(s.sums + (row + i * k) * S::kSumStride + column + j * k, at[i][j],
                                        S::kSumStride, nvcuda::wmma::mem_row_major);
    }
  }

 private:
  template <class Fragment>
  __device__ __forceinline__ static void load(Fragment& to, const T* from, int stride) {
    nvcuda::wmma::load_matrix_sync(to, reinterpret_cast<const Element*>(from), stride);
  }
};

// A tile of a bᵀ (lines by lines) over `depth`, into s.sums. Every thread of the block must call.
template <bool a_turned, bool b_turned, int n, class T>
__device__ __forceinline__ void multiply_tile(Shared<T, a_turned, b_turned>& s, const Factor<T>& a,
                                              const Factor<T>& b, int64_t depth) {
  using S = Shared<T, a_turned, b_turned>;
  const int warp = threadIdx.x / 32, row = warp % kWarpRows * kWarpTile,
            column = warp / kWarpRows * kWarpTile;
  Fetched<T, n, typename S::A> next_a;
  Fetched<T, n, typename S::B> next_b;
  Sums<T, a_turned, b_turned, kTensorCores<T>> sums;
  fetch<a_turned>(next_a, a, 0, depth);
  fetch<b_turned>(next_b, b, 0, depth);
  for (int64_t d = 0; d < depth; d += kDepth) {
    __syncthreads();  // the tiles before have been read
    next_a.store(s.factors.a);
    next_b.store(s.factors.b);
    __syncthreads();
    if (d + kDepth < depth) {
      fetch<a_turned>(next_a, a, d + kDepth, depth);
      fetch<b_turned>(next_b, b, d + kDepth, depth);
    }
    sums.add(s, row, column);
  }
  __syncthreads();
  sums.store(s, row, column);
  __syncthreads();
}

// body(row, column, sum) of each element of a tile that is there; a warp's are neighbours.
template <class S, class Body>
__device__ __forceinline__ void each_sum(const S& s, int64_t rows, int64_t columns, const Body& body) {
  for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
    const int r = i / kColumns, c = i % kColumns;
    if (r < rows && c < columns) body(r, c, s.sums[r * S::kSumStride + c]);
  }
}

// The expert of a tile and its first row (expert_tiles); -1: there is no such tile.
struct RowTile {
  int expert;
  int64_t row;
};
__device__ __forceinline__ RowTile find_tile(const int32_t* start, int64_t count, int64_t tile) {
  __shared__ int found;
  const int32_t begin = start[0];
  const auto first = [&](int64_t e) { return (start[e] - begin) / kRows + e; };
  if (tile >= first(count)) return {-1, 0};
  for (int64_t e = threadIdx.x; e < count; e += kThreads) {
    if (first(e) <= tile && tile < first(e + 1)) found = static_cast<int>(e);
  }
  __syncthreads();
  return {found, start[found] + (tile - first(found)) * kRows};
}

template <class T, bool columns, int n>
__global__ void __launch_bounds__(kThreads) multiply(MultiplyExperts a) {
  Shared<T, false, columns>& s = Shared<T, false, columns>::of_block();
  const RowTile tile = find_tile(a.start, a.count, blockIdx.x);
  if (tile.expert < 0) return;
  const int64_t rows = a.start[tile.expert + 1] - tile.row, depth = a.x.columns;
  if (rows <= 0) return;
  const int64_t column = static_cast<int64_t>(blockIdx.y) * kColumns, left = a.out.columns - column;
  const T* const weight = static_cast<const T*>(a.weight[tile.expert]);
  const Factor<T> x = {static_cast<const T*>(a.x.data) + tile.row * a.x.stride, a.x.stride, rows};
  Factor<T> w = {weight + column * depth, depth, left};
  if constexpr (columns) w = {weight + column, a.out.columns, left};
  multiply_tile<false, columns, n>(s, x, w, depth);
  T* const out = static_cast<T*>(a.out.data) + tile.row * a.out.stride + column;
  each_sum(s, rows, left, [&](int r, int c, float sum) {
    T* const to = out + r * a.out.stride + c;
    *to = round_to<T>(a.add ? to_float(*to) + a.scale * sum : a.scale * sum);
  });
}

template <class T, class Gradient, int n>
__global__ void __launch_bounds__(kThreads) weight_gradient(ExpertGradients a) {
  Shared<T, true, true>& s = Shared<T, true, true>::of_block();
  Gradient* const gradient = static_cast<Gradient*>(a.gradient[blockIdx.z]);
  const int64_t begin = a.start[blockIdx.z], rows = a.start[blockIdx.z + 1] - begin;
  if (gradient == nullptr || (rows == 0 && !a.overwrite)) return;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * kRows,
                column = static_cast<int64_t>(blockIdx.x) * kColumns, width = a.x.columns;
  const Factor<T> dy = {static_cast<const T*>(a.dy.data) + begin * a.dy.stride + row, a.dy.stride,
                        a.dy.columns - row};
  const Factor<T> x = {static_cast<const T*>(a.x.data) + begin * a.x.stride + column, a.x.stride,
                       width - column};
  multiply_tile<true, true, n>(s, dy, x, rows);
  each_sum(s, dy.lines, x.lines, [&](int r, int c, float sum) {
    Gradient* const to = gradient + (row + r) * width + column + c;
    *to = round_to<Gradient>(a.overwrite ? sum : to_float(*to) + sum);
  });
}

// Whether rows of these can be read 16 bytes at a time.
template <class T>
bool reads_packs(const View& x) {
  return x.columns % kPack<T> == 0 && x.stride % kPack<T> == 0 && aligned(16, x.data);
}

}  // namespace

void multiply_experts(const MultiplyExperts& a, StreamView stream) {
  const dim3 grid(static_cast<unsigned>(expert_tiles(a.x.rows, a.count)), blocks_of(a.out.columns, kColumns));
  with_dtype(a.x.dtype, [&](auto t) {
    using T = decltype(t);
    bool packs = reads_packs<T>(a.x) && a.out.columns % kPack<T> == 0;
    for (int64_t e = 0; e < a.count; ++e) packs = packs && aligned(16, a.weight[e]);
    if (a.columns) {
      packs ? launch(multiply<T, true, kPack<T>>, grid, kThreads, stream, a)
            : launch(multiply<T, true, 1>, grid, kThreads, stream, a);
    } else {
      packs ? launch(multiply<T, false, kPack<T>>, grid, kThreads, stream, a)
            : launch(multiply<T, false, 1>, grid, kThreads, stream, a);
    }
  });
}

void expert_gradients(const ExpertGradients& a, StreamView stream) {
  const dim3 grid(blocks_of(a.x.columns, kColumns), blocks_of(a.dy.columns, kRows),
                  static_cast<unsigned>(a.count));
  with_dtype(a.x.dtype, [&](auto t) {
    with_gradient_dtype(a.gradient_dtype, [&](auto g) {
      using T = decltype(t);
      using Gradient = decltype(g);
      reads_packs<T>(a.x) && reads_packs<T>(a.dy)
          ? launch(weight_gradient<T, Gradient, kPack<T>>, grid, kThreads, stream, a)
          : launch(weight_gradient<T, Gradient, 1>, grid, kThreads, stream, a);
    });
  });
}

}  // namespace lm::gpu
