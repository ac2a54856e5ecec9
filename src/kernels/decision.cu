// A step's check on the GPU, in the order of additions that the host has. A thread adds a block's norms, as
// their order allows no more: 128 thousand, of a vocabulary of 525 million elements, are a millisecond's
// additions; blocks are added side by side, and the other warps fetch what comes next.
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"
#include "kernels/decision_formula.h"

namespace lm::gpu {
namespace {

constexpr int kFetched = 1024;  // norms at a time

__global__ void add_block(Decide a) {
  __shared__ double fetched[2][kFetched];
  const int64_t begin = a.first_granule[blockIdx.x], end = a.first_granule[blockIdx.x + 1];
  const int64_t pieces = (end - begin + kFetched - 1) / kFetched;
  const int self = threadIdx.x;
  double sum = 0;
  for (int64_t piece = -1; piece < pieces; ++piece) {
    const int64_t next = begin + (piece + 1) * kFetched;
    for (int64_t i = self - 32; self >= 32 && i < kFetched && next + i < end; i += kThreads - 32)
      fetched[(piece + 1) % 2][i] = a.sums[next + i];
    if (self == 0 && piece >= 0) {
      const int64_t here = begin + piece * kFetched;
      for (int64_t i = 0; i < kFetched && here + i < end; ++i) sum += fetched[piece % 2][i];
    }
    __syncthreads();
  }
  if (self == 0) a.squares[blockIdx.x] = sum;
}

// The largest of the block's numbers; every thread calls.
__device__ __forceinline__ int64_t last_of_block(int64_t x) {
  __shared__ int64_t all[kThreads];
  __syncthreads();  // the previous call's readers are done
  all[threadIdx.x] = x;
  __syncthreads();
  int64_t last = -1;
  for (int t = 0; t < kThreads; ++t) last = last < all[t] ? all[t] : last;
  return last;
}

template <class G>
__device__ __forceinline__ void find_element(const Decide& a, StepDecision& d) {
  const GradientArray& array = array_of(a, d.granule);
  const G* const granule = static_cast<const G*>(LM_ADDRESS_IN_MEMORY(array.gradient)) +
                           (d.granule - array.first_granule) * kGranuleElements;
  int64_t mine = -1;
  for (int64_t i = threadIdx.x; i < kGranuleElements; i += kThreads) {
    if (!is_finite(to_float(granule[i]))) mine = i;
  }
  d.element = last_of_block(mine);
  if (d.element < 0) return;
  const float x = to_float(granule[d.element]);
  d.is_nan = x != x ? 1 : 0;
}

__global__ void decide_step(Decide a) {
  double square = 0;
  for (int64_t b = 0; b < a.blocks; ++b) square += a.squares[b];
  StepDecision d = decision_of(a, square);
  if (d.skipped != 0) {  // of all threads alike
    int64_t mine = -1;
    const int64_t granules = a.first_granule[a.blocks];
    for (int64_t g = threadIdx.x; g < granules; g += kThreads) {
      if (!is_finite(a.sums[g])) mine = g;
    }
    d.granule = last_of_block(mine);
    if (d.granule >= 0)
      a.gradient_dtype == DType::kF32 ? find_element<float>(a, d) : find_element<Bf16>(a, d);
  }
  if (threadIdx.x == 0) *a.out = d;
}

}  // namespace

void decide(const Decide& a, StreamView stream) {
  LM_CHECK(a.gradient_dtype == DType::kF32 || a.gradient_dtype == DType::kBF16, "decide: gradients' type");
  launch(add_block, static_cast<unsigned>(a.blocks), kThreads, stream, a);
  launch(decide_step, 1u, kThreads, stream, a);
}

}  // namespace lm::gpu
