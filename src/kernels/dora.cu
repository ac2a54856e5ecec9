// DoRA's kernels on the GPU. Compiled with -fmad=false: these bits are the CPU's. Products of fp32 numbers
// are exact in fp64, so a fused multiply-add of them gives the bits of two operations.
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"
#include "kernels/norms_formula.h"

namespace lm::gpu {
namespace {

// 64 threads are the lanes of a row.
template <class Weight, class Factor>
__global__ void norm_of_row(AdaptedNorms a) {
  __shared__ double lane[kNormLanes];
  const int64_t row = blockIdx.x;
  const Weight* w = static_cast<const Weight*>(a.weight.data) + row * a.weight.stride;
  double sum = 0;
  for (int64_t j = threadIdx.x; j < a.weight.columns; j += kNormLanes) {
    const double v = static_cast<double>(to_float(w[j]));
    sum = __fma_rn(v, v, sum);
  }
  lane[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  const Factor* b = static_cast<const Factor*>(a.b.data) + row * a.b.stride;
  const Factor* h = static_cast<const Factor*>(a.h.data) + row * a.h.stride;
  double cross = 0;
  for (int64_t k = 0; k < a.b.columns; ++k)
    cross = __fma_rn(static_cast<double>(to_float(b[k])), static_cast<double>(to_float(h[k])), cross);
  const double all = add_norm_lanes(lane) + static_cast<double>(a.scale) * cross;
  const float norm = static_cast<float>(sqrt(all < 0 ? 0. : all));
  a.norms[row] = norm;
  a.factors[row] = to_float(static_cast<const Factor*>(a.magnitude)[row]) / norm;
}

template <class T>
__global__ void scale_rows(ScaleColumns a) {
  const int64_t r = blockIdx.x, j = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
  if (j >= a.x.columns) return;
  const auto at = [&](const View& v) { return to_float(static_cast<const T*>(v.data)[r * v.stride + j]); };
  float v = at(a.x);
  if (a.factors != nullptr) v = a.factors[j] * v;
  if (a.bias != nullptr) v = v + to_float(static_cast<const T*>(a.bias)[j]);
  if (a.addend.data != nullptr) v = v + at(a.addend);
  if (a.subtrahend.data != nullptr) v = v - at(a.subtrahend);
  static_cast<T*>(a.out.data)[r * a.out.stride + j] = round_to<T>(v);
}

template <class T>
__global__ void scale_block_backward(ScaleColumnsBackward a) {
  const int64_t j = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x, block = blockIdx.x;
  if (j >= a.dy.columns) return;
  const int64_t end = min(a.dy.rows, (block + 1) * kRowBlock);
  const float factor = a.factors[j];
  float sum = 0;
  for (int64_t r = block * kRowBlock; r < end; ++r) {
    const float dy = to_float(static_cast<const T*>(a.dy.data)[r * a.dy.stride + j]);
    sum += dy * to_float(static_cast<const T*>(a.x.data)[r * a.x.stride + j]);
    static_cast<T*>(a.out.data)[r * a.out.stride + j] = round_to<T>(factor * dy);
    if (a.rest.data != nullptr)
      static_cast<T*>(a.rest.data)[r * a.rest.stride + j] = round_to<T>((factor - 1.f) * dy);
  }
  a.partial[block * a.dy.columns + j] = sum;
}

__global__ void divide_sums(ScaleColumnsBackward a) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (j < a.dy.columns) a.sums[j] = a.sums[j] / a.norms[j];
}

}  // namespace

void adapted_norms(const AdaptedNorms& a, StreamView stream) {
  with_dtype(a.weight.dtype, [&](auto weight) {
    with_dtype(a.b.dtype, [&](auto factor) {
      launch(norm_of_row<decltype(weight), decltype(factor)>, static_cast<unsigned>(a.weight.rows),
             kNormLanes, stream, a);
    });
  });
}

void scale_columns(const ScaleColumns& a, StreamView stream) {
  with_dtype(a.x.dtype, [&](auto t) {
    launch(scale_rows<decltype(t)>, dim3(static_cast<unsigned>(a.x.rows), blocks_of(a.x.columns, 128)), 128,
           stream, a);
  });
}

void scale_columns_backward(const ScaleColumnsBackward& a, StreamView stream) {
  const int64_t blocks = (a.dy.rows + kRowBlock - 1) / kRowBlock, width = a.dy.columns;
  with_dtype(a.dy.dtype, [&](auto t) {
    launch(scale_block_backward<decltype(t)>, dim3(static_cast<unsigned>(blocks), blocks_of(width, 128)), 128,
           stream, a);
  });
  launch(sum_partials, blocks_of(width, 128), 128, stream, static_cast<const float*>(a.partial), blocks,
         width, a.sums);
  if (a.norms != nullptr) launch(divide_sums, blocks_of(width, 128), 128, stream, a);
}

}  // namespace lm::gpu
