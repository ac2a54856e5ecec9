// Routing of tokens to experts on the GPU: a warp chooses for a token, and then a block for each expert lists
// its rows. Slots are numbers, whose order no thread decides.
#include "base/expert_count.h"
#include "kernels/activation_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"
#include "kernels/route_formula.h"

namespace lm::gpu {
namespace {

constexpr int kWarps = kThreads / 32;
// Warps of a block that lists rows, at most, and slots that each of fewer has.
constexpr int kMostSorters = 32, kSlotsEach = 256;

// What a lane would choose of the experts lane, lane + 32, ... that are not taken, and the first of them: of
// NaNs only the first expert that is left can be chosen, as on the CPU.
struct Choice {
  float most = float_of(0xFF800000);  // -inf
  int expert = INT32_MAX;             // that is no NaN
  int first = INT32_MAX;

  __device__ __forceinline__ void see(float logit, int e) {
    if (first == INT32_MAX) first = e;
    if (logit == logit && (expert == INT32_MAX || logit > most)) most = logit, expert = e;
  }
  __device__ __forceinline__ void join(int lanes) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, most, lanes);
    const int at = __shfl_xor_sync(0xFFFFFFFFu, expert, lanes);
    first = min(first, __shfl_xor_sync(0xFFFFFFFFu, first, lanes));
    if (other > most || (other == most && at < expert)) most = other, expert = at;
  }
};

template <class T>
__device__ __forceinline__ void softmax(const T* logits, int n, float* out) {
  const int lane = threadIdx.x % 32;
  float largest = float_of(0xFF800000);
  for (int e = lane; e < n; e += 32) largest = fmaxf(largest, to_float(logits[e]));
  largest = warp_max(largest);
  float sum = 0;
  for (int e = lane; e < n; e += 32) {
    const float x = expf(to_float(logits[e]) - largest);
    out[e] = x;
    sum += x;
  }
  sum = warp_sum(sum);
  for (int e = lane; e < n; e += 32) out[e] = out[e] / sum;
}

// The k largest of value(0), ..., in descending order; lane 0 calls chosen(j, which). Bit i of what a lane
// returns: lane + 32 i is among them.
template <class Value, class Chosen>
__device__ __forceinline__ uint32_t choose(int n, int64_t k, const Value& value, const Chosen& chosen) {
  const int lane = threadIdx.x % 32;
  uint32_t taken = 0;
  for (int64_t j = 0; j < k; ++j) {
    Choice choice;
    for (int e = lane; e < n; e += 32) {
      if ((taken >> (e / 32) & 1) == 0) choice.see(value(e), e);
    }
    for (int lanes = 16; lanes > 0; lanes /= 2) choice.join(lanes);
    const float first = value(choice.first);
    const int best = first == first ? choice.expert : choice.first;
    if (best % 32 == lane) taken |= 1u << (best / 32);
    if (lane == 0) chosen(j, best);
  }
  return taken;
}

// p: softmax(logits), and the choice of the largest logits.
template <class T>
__device__ __forceinline__ void choose_by_logits(const RouteTokens& a, const T* logits, float* p,
                                                 int32_t* out) {
  const int n = static_cast<int>(a.logits.columns);
  softmax(logits, n, p);
  choose(
      n, a.chosen, [&](int e) { return to_float(logits[e]); }, [&](int64_t j, int e) { out[j] = e; });
}

// p: sigmoid(logits), and the choice by it and the correction. Bit g of `kept`, a warp's own: group g is
// among the best.
template <class T>
__device__ __forceinline__ void choose_by_scores(const RouteTokens& a, const T* logits, float* p,
                                                 uint32_t* kept, int32_t* out) {
  const int n = static_cast<int>(a.logits.columns), lane = threadIdx.x % 32;
  const int groups = static_cast<int>(a.scores.groups), each = n / groups;
  const auto score = [&](int e) { return p[e] + a.scores.correction[e]; };
  for (int e = lane; e < n; e += 32) p[e] = sigmoid(to_float(logits[e]));
  __syncwarp();  // other lanes read them
  const auto write = [&](int64_t j, int e) { out[j] = e; };
  if (groups == 1) {
    choose(n, a.chosen, score, write);
    return;
  }
  const uint32_t best = choose(
      groups, a.scores.kept_groups,
      [&](int g) { return two_largest(each, [&](int e) { return score(g * each + e); }); },
      [](int64_t, int) {});
  for (int word = 0; word * 32 < groups; ++word) {
    const uint32_t bits = __ballot_sync(0xFFFFFFFFu, static_cast<int>(best >> word & 1));
    if (lane == 0) kept[word] = bits;
  }
  __syncwarp();
  const auto kept_score = [&](int e) {
    const int g = e / each;
    return (kept[g / 32] >> (g % 32) & 1) != 0 ? score(e) : float_of(0xFF800000);  // -inf
  };
  choose(n, a.chosen, kept_score, write);
}

template <class T>
__global__ void route(RouteTokens a) {
  __shared__ uint32_t kept[kWarps][kMostExperts / 32];
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32, k = a.chosen;
  if (t >= a.tokens) return;
  const T* const logits = static_cast<const T*>(a.logits.data) + t * a.logits.stride;
  float* const p = a.probability + t * a.logits.columns;
  int32_t* const expert = a.routing.expert + t * k;
  if (a.scores.sigmoid) {
    choose_by_scores(a, logits, p, kept[threadIdx.x / 32], expert);
  } else {
    choose_by_logits(a, logits, p, expert);
  }
  __syncwarp();  // other lanes have written p
  if (threadIdx.x % 32 != 0) return;
  float sum = a.renormalise ? 0.f : 1.f;
  for (int64_t j = 0; a.renormalise && j < k; ++j) sum += p[expert[j]];
  if (a.renormalise && a.scores.sigmoid) sum += kLeastScores;
  for (int64_t j = 0; j < k; ++j) {
    float weight = p[expert[j]] / sum;
    if (a.scores.sigmoid) weight *= a.scores.scale;
    if (a.factors != nullptr) weight *= a.factors[expert[j]];
    a.routing.weight[t * k + j] = a.round ? round_as<T>(weight) : weight;
  }
}

// Expert blockIdx.x: where its rows begin, and its rows. A warp reads a range of the slots, twice: how many
// are this expert's, and of earlier experts; then each slot's row. Of E experts that is 8 E T k bytes out of
// the L2 cache, and nobody waits for another block.
__global__ void list_rows(RouteTokens a) {
  __shared__ int mine[kMostSorters], earlier[kMostSorters];
  const Routing r = a.routing;
  const int e = static_cast<int>(blockIdx.x), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = blockDim.x / 32;
  const int64_t slots = a.tokens * a.chosen, each = (slots + blockDim.x - 1) / blockDim.x * 32;
  const int64_t begin = min(slots, warp * each), end = min(slots, begin + each);
  int equal = 0, less = 0;
  for (int64_t s = begin + lane; s < end; s += 32) equal += r.expert[s] == e, less += r.expert[s] < e;
  for (int lanes = 16; lanes > 0; lanes /= 2) {
    equal += __shfl_xor_sync(0xFFFFFFFFu, equal, lanes);
    less += __shfl_xor_sync(0xFFFFFFFFu, less, lanes);
  }
  if (lane == 0) mine[warp] = equal, earlier[warp] = less;
  __syncthreads();
  int row = 0;
  for (int w = 0; w < warps; ++w) row += earlier[w] + (w < warp ? mine[w] : 0);
  if (threadIdx.x == 0) r.start[e] = row;
  if (threadIdx.x == 0 && e == 0) r.start[gridDim.x] = static_cast<int32_t>(slots);
  for (int64_t first = begin; first < end; first += 32) {
    const int64_t s = first + lane;
    const bool is = s < end && r.expert[s] == e;
    const uint32_t all = __ballot_sync(0xFFFFFFFFu, is);
    if (is) {
      const int at = row + __popc(all & ((1u << lane) - 1));
      r.row[s] = at;
      r.slot[at] = static_cast<int32_t>(s);
      r.token[at] = static_cast<int32_t>(s / a.chosen);
    }
    row += __popc(all);
  }
}

}  // namespace

void route_tokens(const RouteTokens& a, StreamView stream) {
  LM_CHECK(a.logits.columns <= kMostExperts, "too many experts");
  LM_CHECK(!a.pad, "rows of experts are padded on the CPU alone");
  with_dtype(a.logits.dtype,
             [&](auto t) { launch(route<decltype(t)>, blocks_of(a.tokens, kWarps), kThreads, stream, a); });
  const int filled = static_cast<int>(blocks_of(a.tokens * a.chosen, kSlotsEach));
  const int sorters = max(1, min(kMostSorters, filled));
  launch(list_rows, static_cast<unsigned>(a.logits.columns), 32 * sorters, stream, a);
}

}  // namespace lm::gpu
