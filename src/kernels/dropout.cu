// LoRA's dropout on the GPU: a thread makes one call of Philox and so four features, 16 apart. Compiled with
// -fmad=false: the CPU's bits.
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"
#include "kernels/dropout_formula.h"

namespace lm::gpu {
namespace {

template <class T>
__global__ void drop(Dropout a, uint32_t threshold, float scale) {
  const int64_t r = blockIdx.x;
  const uint32_t call = blockIdx.y * blockDim.x + threadIdx.x;
  const int64_t first = static_cast<int64_t>(call / 16) * 64 + call % 16;
  if (first >= a.width) return;
  const PhiloxWords<uint32_t> numbers = philox<uint32_t>(
      a.key, call, 0u, static_cast<uint32_t>(a.position[r]), static_cast<uint32_t>(a.sample[r]));
  for (int w = 0; w < 4; ++w) {
    const int64_t j = first + w * 16;
    if (j >= a.width) return;
    const float x = to_float(static_cast<const T*>(a.x)[r * a.width + j]) * scale;
    const float kept = (numbers.word[w] >> 8) < threshold ? 0.f : x;
    T* out = static_cast<T*>(a.out) + r * a.width + j;
    *out = round_to<T>(a.accumulate ? to_float(*out) + kept : kept);
  }
}

}  // namespace

void dropout(const Dropout& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    const int64_t calls = (a.width + 63) / 64 * 16;
    launch(drop<decltype(t)>, dim3(static_cast<unsigned>(a.rows), blocks_of(calls, 128)), 128, stream, a,
           dropout_threshold(a.p), dropout_scale(a.p));
  });
}

}  // namespace lm::gpu
