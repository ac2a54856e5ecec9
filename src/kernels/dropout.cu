// Dropout on the GPU. Sixteen neighbours of a row take their numbers from sixteen calls of Philox, and
// a call is good for four features that lie 16 apart: a warp makes all calls of its features, and votes tell
// every thread which of its neighbours are dropped. Compiled with -fmad=false: the CPU's bits.
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"
#include "kernels/dropout_formula.h"

namespace lm::gpu {
namespace {

constexpr int kBlock = 128;

// The numbers of features 64 * (call / 16) + call % 16 + {0, 16, 32, 48}.
__device__ __forceinline__ PhiloxWords<uint32_t> numbers_of(uint64_t key, uint32_t call, int32_t row_position,
                                                            int32_t row_sample) {
  const auto position = static_cast<uint32_t>(row_position), sample = static_cast<uint32_t>(row_sample);
  return philox<uint32_t>(key, call, 0u, position, sample);
}

// A thread has n neighbours, a warp 32 n: the features of n / 4 calls per thread. A number below `limit`
// drops.
template <class T, int n, bool accumulate>
__global__ void drop_packs(Dropout a, uint32_t limit, float scale) {
  constexpr uint32_t kCalls = n / 4;
  const int64_t r = blockIdx.x;
  const uint32_t thread = blockIdx.y * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
  if (int64_t{thread - lane} * n >= a.width) return;  // whole warps only: every lane votes
  const int64_t j = int64_t{thread} * n;
  const bool inside = j < a.width;
  T* out = static_cast<T*>(a.out) + r * a.width + j;
  Loaded<T, n> from{}, before{};
  if (inside) from = load<n>(static_cast<const T*>(a.x) + r * a.width + j);
  if (accumulate && inside) before = load<n>(out);
  const int32_t position = a.position[r], sample = a.sample[r];
  uint32_t vote[kCalls][4];
  for (uint32_t q = 0; q < kCalls; ++q) {
    const uint32_t call = (thread - lane) * kCalls + q * 32 + lane;
    const PhiloxWords<uint32_t> numbers = numbers_of(a.key, call, position, sample);
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
  float x[n], sum[n];
  unpack<T>(from, x), unpack<T>(before, sum);
  for (int i = 0; i < n; ++i) {
    const float kept = (dropped >> i & 1u) != 0 ? 0.f : x[i] * scale;
    sum[i] = accumulate ? sum[i] + kept : kept;
  }
  store_rounded(out, sum);
}

// Any width and address: a thread makes one call and so four features, 16 apart.
template <class T>
__global__ void drop(Dropout a, uint32_t threshold, float scale) {
  const int64_t r = blockIdx.x;
  const uint32_t call = blockIdx.y * blockDim.x + threadIdx.x;
  const int64_t first = static_cast<int64_t>(call / 16) * 64 + call % 16;
  if (first >= a.width) return;
  const PhiloxWords<uint32_t> numbers = numbers_of(a.key, call, a.position[r], a.sample[r]);
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
    // At least a warp's features; and of 32 bits nothing is above all, as p = 1 would have it.
    if (a.width >= 32 * n && a.width % n == 0 && aligned(16, a.x, a.out) && threshold < 1u << 24) {
      const dim3 grid(rows, blocks_of(a.width, int64_t{kBlock} * n));
      return launch(a.accumulate ? drop_packs<T, n, true> : drop_packs<T, n, false>, grid, kBlock, stream, a,
                    threshold << 8, scale);
    }
    const int64_t calls = (a.width + 63) / 64 * 16;
    launch(drop<T>, dim3(rows, blocks_of(calls, kBlock)), kBlock, stream, a, threshold, scale);
  });
}

}  // namespace lm::gpu
