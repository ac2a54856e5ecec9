// Rows by index on the GPU. A thread owns a column of a row, so sums keep the order of their list; nothing is
// contracted, and every bit is the CPU's.
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

// T is whatever the row can be copied in: 16 bytes, or the element.
template <class T>
__global__ void gather(const T* table, const int32_t* index, T* out, int64_t width) {
  const int64_t r = blockIdx.x, from = index[r];
  for (int64_t j = threadIdx.x; j < width; j += blockDim.x) out[r * width + j] = table[from * width + j];
}

template <class T, int n>
__global__ void gather_scaled(GatherRows a) {
  const int64_t r = blockIdx.x, from = a.index[r];
  const T* row = static_cast<const T*>(a.table) + from * a.width;
  T* out = static_cast<T*>(a.out) + r * a.width;
  for (int64_t j = int64_t{threadIdx.x} * n; j < a.width; j += int64_t{blockDim.x} * n) {
    const Pack<T, n> x = load_pack<n>(row + j);
    float scaled[n];
    for (int i = 0; i < n; ++i) scaled[i] = round_as<T>(to_float(x.at[i]) * a.scale);
    if (a.add) {
      const Pack<T, n> before = load_pack<n>(out + j);
      for (int i = 0; i < n; ++i) scaled[i] = to_float(before.at[i]) + scaled[i];
    }
    store_rounded(out + j, scaled);
  }
}

template <class T>
__global__ void scatter(ScatterRows a) {
  const int64_t r = blockIdx.x, to = a.index[r];
  for (int64_t j = threadIdx.x; j < a.width; j += blockDim.x) {
    static_cast<T*>(a.out)[to * a.width + j] = static_cast<const T*>(a.source)[r * a.width + j];
  }
}

template <class T>
__global__ void sum_listed(SumRows a) {
  const int64_t s = blockIdx.x, j = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (j >= a.width) return;
  float sum = a.sums[s * a.width + j];
  for (int32_t k = a.start[s]; k < a.start[s + 1]; ++k) {
    sum += to_float(static_cast<const T*>(a.source)[a.order[k] * a.width + j]);
  }
  a.sums[s * a.width + j] = sum;
}

template <class T>
__global__ void take_first(TakeFirstRows a) {
  const int64_t i = blockIdx.x, j = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (j >= a.width) return;
  float sum = a.sums[i * a.width + j];
  for (int64_t d = 0; d < a.documents; ++d) {
    if (i >= a.start[d + 1] - a.start[d]) continue;
    T* at = static_cast<T*>(a.x) + (a.first + a.start[d] + i) * a.stride + j;
    sum += to_float(*at);
    *at = round_to<T>(0.f);
  }
  a.sums[i * a.width + j] = sum;
}

template <class T>
__global__ void add_listed(AddRows a) {
  const int64_t s = blockIdx.x, j = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (j >= a.width) return;
  T* to = static_cast<T*>(a.gradient) + a.row[s] * a.width + j;
  *to = round_to<T>(to_float(*to) + a.sums[s * a.width + j] * a.scale);
}

template <class T>
void gather_as(const GatherRows& a, int64_t width, StreamView stream) {
  launch(gather<T>, static_cast<unsigned>(a.rows), 128, stream, static_cast<const T*>(a.table), a.index,
         static_cast<T*>(a.out), width);
}

}  // namespace

void gather_rows(const GatherRows& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    const bool packs = a.width % kPack<T> == 0 && aligned(16, a.table, a.out);
    if (a.scale != 1 || a.add) {
      const unsigned grid = static_cast<unsigned>(a.rows);
      if (packs) return launch(gather_scaled<T, kPack<T>>, grid, 128, stream, a);
      return launch(gather_scaled<T, 1>, grid, 128, stream, a);
    }
    if (packs) return gather_as<Pack<T, kPack<T>>>(a, a.width / kPack<T>, stream);
    gather_as<T>(a, a.width, stream);
  });
}

void scatter_rows(const ScatterRows& a, StreamView stream) {
  zero_bytes(a.out, a.out_rows * a.width * static_cast<int64_t>(dtype_size(a.dtype)), stream);
  with_dtype(a.dtype,
             [&](auto t) { launch(scatter<decltype(t)>, static_cast<unsigned>(a.rows), 128, stream, a); });
}

void sum_rows(const SumRows& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    launch(sum_listed<decltype(t)>, dim3(static_cast<unsigned>(a.slots), blocks_of(a.width, 128)), 128,
           stream, a);
  });
}

void take_first_rows(const TakeFirstRows& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    launch(take_first<decltype(t)>, dim3(static_cast<unsigned>(a.rows), blocks_of(a.width, 128)), 128, stream,
           a);
  });
}

void add_rows(const AddRows& a, StreamView stream) {
  with_dtype(a.gradient_dtype, [&](auto t) {
    launch(add_listed<decltype(t)>, dim3(static_cast<unsigned>(a.slots), blocks_of(a.width, 128)), 128,
           stream, a);
  });
}

}  // namespace lm::gpu
