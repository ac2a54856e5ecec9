// LoRA's dropout on the GPU. Sixteen neighbours of a row take their numbers from sixteen calls of Philox, and
// a call is good for four features that lie 16 apart: a warp makes all calls of its features, and votes tell
// every thread which of its neighbours are dropped. Compiled with -fmad=false: the CPU's bits.
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"
#include "kernels/dropout_formula.h"

namespace lm::gpu {
namespace {

constexpr int kBlock = 128;

// Of features 64 * (call / 16) + call % 16 + {0, 16, 32, 48} of row r.
__device__ __forceinline__ PhiloxWords<uint32_t> numbers_of(const Dropout& a, int64_t r, uint32_t call) {
  const auto position = static_cast<uint32_t>(a.position[r]), sample = static_cast<uint32_t>(a.sample[r]);
  return philox<uint32_t>(a.key, call, 0u, position, sample);
}

// A thread has n neighbours, a warp 32 n: the features of n / 4 calls per thread. A number below `limit`
// drops.
template <class T, int n, bool accumulate>
__global__ void drop(Dropout a, uint32_t limit, float scale) {
  constexpr uint32_t kCalls = n / 4;
  const int64_t r = blockIdx.x;
  const uint32_t thread = blockIdx.y * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
  if (int64_t{thread - lane} * n >= a.width) return;  // whole warps only: every lane votes
  const bool inside = int64_t{thread} * n < a.width;
  const int64_t j = inside ? int64_t{thread} * n : 0;  // who has no feature reads the first ones
  T* out = static_cast<T*>(a.out) + r * a.width + j;
  Pack<T, n> x = load_pack<n>(static_cast<const T*>(a.x) + r * a.width + j), sum;
  if constexpr (accumulate) sum = load_pack<n>(out);
  uint32_t vote[kCalls][4];
  for (uint32_t q = 0; q < kCalls; ++q) {
    const uint32_t call = (thread - lane) * kCalls + q * 32 + lane;
    const PhiloxWords<uint32_t> numbers = numbers_of(a, r, call);
    for (int w = 0; w < 4; ++w) vote[q][w] = __ballot_sync(0xFFFFFFFFu, numbers.word[w] < limit);
  }
  if (!inside) return;
  // The thread's features are one word of n neighbouring calls. Selected one bit of the index at a time: an
  // array in registers has no other index.
  const uint32_t feature = lane * n, word = feature / 16 % 4, call = feature / 64 * 16 + feature % 16;
  uint32_t of_word[kCalls];
  for (uint32_t q = 0; q < kCalls; ++q) {
    const uint32_t low = word % 2 == 0 ? vote[q][0] : vote[q][1];
    const uint32_t high = word % 2 == 0 ? vote[q][2] : vote[q][3];
    of_word[q] = word < 2 ? low : high;
  }
  const uint32_t dropped = (call < 32 ? of_word[0] : of_word[kCalls - 1]) >> call % 32;
  float result[n];
  for (int i = 0; i < n; ++i) {
    const float kept = (dropped >> i & 1u) != 0 ? 0.f : to_float(x.at[i]) * scale;
    result[i] = accumulate ? to_float(sum.at[i]) + kept : kept;
  }
  store_rounded(out, result);
}

// Any width and address: a thread makes one call and so four features, 16 apart.
template <class T>
__global__ void drop_singly(Dropout a, uint32_t threshold, float scale) {
  const int64_t r = blockIdx.x;
  const uint32_t call = blockIdx.y * blockDim.x + threadIdx.x;
  const int64_t first = static_cast<int64_t>(call / 16) * 64 + call % 16;
  if (first >= a.width) return;
  const PhiloxWords<uint32_t> numbers = numbers_of(a, r, call);
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
    using T = decltype(t);
    constexpr int n = kPack<T>;
    const uint32_t threshold = dropout_threshold(a.p);
    const float scale = dropout_scale(a.p);
    const unsigned rows = static_cast<unsigned>(a.rows);
    // Of the upper 24 bits: with p = 1 all 32 bits have no limit above them.
    if (a.width % n == 0 && aligned(16, a.x, a.out) && threshold < 1u << 24) {
      const dim3 grid(rows, blocks_of(a.width, int64_t{kBlock} * n));
      return launch(a.accumulate ? drop<T, n, true> : drop<T, n, false>, grid, kBlock, stream, a,
                    threshold << 8, scale);
    }
    const int64_t calls = (a.width + 63) / 64 * 16;
    launch(drop_singly<T>, dim3(rows, blocks_of(calls, kBlock)), kBlock, stream, a, threshold, scale);
  });
}

}  // namespace lm::gpu
