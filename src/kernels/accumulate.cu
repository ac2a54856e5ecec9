// Sums over arrays and rows on the GPU. Compiled with -fmad=false: these bits are the CPU's, but for which
// NaN an fp32 sum that is no number stores (a GPU has one, a CPU passes on an operand's).
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

template <class To, class From, int n>
__global__ void add_arrays(Accumulate a) {
  To* to = static_cast<To*>(a.to);
  const From* from = static_cast<const From*>(a.from);
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * n;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * n; i < a.elements;
       i += step) {
    const Pack<From, n> b = load_pack<n>(from + i);
    Pack<To, n> r{};
    if (!a.overwrite) r = load_pack<n>(to + i);
    for (int k = 0; k < n; ++k) {
      r.at[k] = round_to<To>(a.overwrite ? to_float(b.at[k]) : to_float(r.at[k]) + to_float(b.at[k]));
    }
    store_pack<n>(to + i, r);
  }
}

template <class T>
__global__ void column_partials(SumColumns a) {
  const int64_t j = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x, block = blockIdx.x;
  if (j >= a.width) return;
  const int64_t end = min(a.rows, (block + 1) * kRowBlock);
  float sum = 0;
  for (int64_t r = block * kRowBlock; r < end; ++r)
    sum += to_float(static_cast<const T*>(a.x)[r * a.stride + j]);
  a.partial[block * a.width + j] = sum;
}

template <class T>
__global__ void bias_rows(AddBias a) {
  const int64_t r = blockIdx.x, j = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (j >= a.width) return;
  T* x = static_cast<T*>(a.x) + r * a.stride + j;
  *x = round_to<T>(to_float(*x) + to_float(static_cast<const T*>(a.bias)[j]));
}

}  // namespace

void accumulate(const Accumulate& a, StreamView stream) {
  with_dtype(a.to_dtype, [&](auto to) {
    with_dtype(a.from_dtype, [&](auto from) {
      using To = decltype(to);
      using From = decltype(from);
      if (a.elements % 4 == 0 && aligned(4 * sizeof(To), a.to) && aligned(4 * sizeof(From), a.from)) {
        return launch(add_arrays<To, From, 4>, stride_blocks(a.elements / 4), kThreads, stream, a);
      }
      launch(add_arrays<To, From, 1>, stride_blocks(a.elements), kThreads, stream, a);
    });
  });
}

void sum_columns(const SumColumns& a, StreamView stream) {
  const int64_t blocks = (a.rows + kRowBlock - 1) / kRowBlock;
  with_dtype(a.dtype, [&](auto t) {
    launch(column_partials<decltype(t)>, dim3(static_cast<unsigned>(blocks), blocks_of(a.width, 128)), 128,
           stream, a);
  });
  launch(sum_partials, blocks_of(a.width, 128), 128, stream, static_cast<const float*>(a.partial), blocks,
         a.width, a.sums);
}

void add_bias(const AddBias& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    launch(bias_rows<decltype(t)>, dim3(static_cast<unsigned>(a.rows), blocks_of(a.width, 128)), 128, stream,
           a);
  });
}

}  // namespace lm::gpu
