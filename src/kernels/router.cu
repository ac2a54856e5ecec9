// Around a mixture's experts, on the GPU: factors of a shared expert's rows and of a router's weights, sums
// over a router's choices, and the gradient of its load's balance. Every sum has an order that the shapes
// alone decide: tokens are divided into kRouteChunks ranges, whatever the device, whose sums are added in
// their order.
#include "kernels/activation_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

// Threads of a row, each a lane of the CPU's sum.
constexpr int kLanes = 16, kRows = kThreads / kLanes;

template <class T>
__device__ __forceinline__ T* row_of(const View& x, int64_t row) {
  return static_cast<T*>(x.data) + row * x.stride;
}

template <class T>
__global__ void gate(GateRows a) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  const bool there = r < a.x.rows;
  const int64_t width = there ? a.x.columns : 0;
  const int lane = threadIdx.x % kLanes;
  T* const x = row_of<T>(a.x, r);
  const float factor = there ? sigmoid(to_float(*row_of<T>(a.gate, r))) : 0.f;
  if (a.other.data != nullptr) {
    const T* const other = row_of<T>(a.other, r);
    float sum = 0;
    for (int64_t j = lane; j < width; j += kLanes) sum += to_float(x[j]) * to_float(other[j]);
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
    if (there && lane == 0) *row_of<T>(a.dgate, r) = round_to<T>(sum * factor * (1.f - factor));
  }
  for (int64_t j = lane; j < width; j += kLanes) x[j] = round_to<T>(to_float(x[j]) * factor);
}

constexpr int kWarps = kThreads / 32;

// The sum over a warp's threads (the largest, the smallest): all of them get it.
__device__ __forceinline__ double sum_of_warp(double x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  return x;
}
__device__ __forceinline__ double largest_of_warp(double x) {
  for (int step = 16; step > 0; step /= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  return x;
}
// The sum over kThreads threads of a block, each of which must call.
__device__ __forceinline__ double sum_of_block(double x) {
  __shared__ double warps[kWarps];
  x = sum_of_warp(x);
  __syncthreads();  // the previous call's readers are done
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
  __syncthreads();
  double sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += warps[w];
  return sum;
}

// Block (c, g): of range c of the tokens, experts 32 g ... 32 g + 31, each by a lane; a warp has every
// kWarps-th token.
__global__ void count_range(CountRoutes a) {
  __shared__ double probabilities[kWarps][32], entropies[kWarps][32];
  const int64_t experts = a.probability.columns, tokens = a.probability.rows;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t e = static_cast<int64_t>(blockIdx.y) * 32 + lane,
                each = (tokens + kRouteChunks - 1) / kRouteChunks;
  const int64_t begin = blockIdx.x * each, end = min(tokens, begin + each);
  double probability = 0, entropy = 0;
  for (int64_t t = begin + warp; t < end; t += kWarps) {
    const float* const p = row_of<const float>(a.probability, t);
    double sum = 1, log_sum = 0;
    if (a.scores) {
      sum = 0;
      for (int64_t i = lane; i < experts; i += 32) sum += double{p[i]};
      sum = sum_of_warp(sum);
      log_sum = log(sum);
    }
    if (e >= experts) continue;
    const float x = p[e];
    const double share = a.scores ? double{x} / sum : double{x};
    probability += share;
    if (x > 0) entropy -= share * (double{logf(x)} - log_sum);
  }
  probabilities[warp][lane] = probability;
  entropies[warp][lane] = entropy;
  __syncthreads();
  if (warp != 0 || e >= experts) return;
  probability = entropy = 0;
  for (int w = 0; w < kWarps; ++w) probability += probabilities[w][lane], entropy += entropies[w][lane];
  double* const out = a.partial + blockIdx.x * 2 * experts;
  out[e] = probability;
  out[experts + e] = entropy;
}

__global__ void add_ranges(CountRoutes a) {
  const int64_t experts = a.probability.columns;
  double entropies = 0;
  for (int64_t e = threadIdx.x; e < experts; e += kThreads) {
    double probability = 0, entropy = 0;
    for (int64_t c = 0; c < kRouteChunks; ++c) {
      probability += a.partial[c * 2 * experts + e];
      entropy += a.partial[c * 2 * experts + experts + e];
    }
    a.sums.chosen[e] += a.start[e + 1] - a.start[e];
    a.sums.probability[e] += probability;
    entropies += entropy;
  }
  entropies = sum_of_block(entropies);
  if (threadIdx.x == 0) *a.sums.entropy += entropies;
}

// Number i of layer's sums, of all ranks.
__device__ __forceinline__ double of_ranks(const SettleRoutes& a, int64_t layer, int64_t i) {
  double sum = 0;
  for (int64_t r = 0; r < a.ranks; ++r) sum += a.sums[(r * a.layers + layer) * a.each + i];
  return sum;
}

// The largest and the smallest load of some layers, and their entropies' sum.
struct Loads {
  double most, least, entropy;
};
constexpr double kMore = 1e300;  // than any load
// Of every kWarps-th layer.
__device__ __forceinline__ Loads loads_of_warp(const SettleRoutes& a) {
  const int lane = threadIdx.x % 32;
  double most = 0, less = -kMore, entropy = 0;  // less: minus the smallest
  for (int64_t layer = threadIdx.x / 32; layer < a.layers; layer += kWarps) {
    double all = 0, largest = 0, smallest = kMore;
    for (int64_t e = lane; e < a.experts; e += 32) {
      const double chosen = of_ranks(a, layer, e);
      all += chosen;
      largest = max(largest, chosen);
      smallest = min(smallest, chosen);
    }
    all = sum_of_warp(all);
    largest = largest_of_warp(largest);
    smallest = -largest_of_warp(-smallest);
    if (all > 0) {
      most = max(most, largest * static_cast<double>(a.experts) / all);
      less = max(less, -smallest * static_cast<double>(a.experts) / all);
    }
    entropy += of_ranks(a, layer, 2 * a.experts);
  }
  return {most, -less, entropy};
}

// One block. rows: tokens of all layers; without one all is 0.
__global__ void settle(SettleRoutes a) {
  __shared__ Loads warps[kWarps];
  double slots = 0, balance = 0;
  for (int64_t e = threadIdx.x; e < a.experts; e += kThreads) {
    for (int64_t layer = 0; layer < a.layers; ++layer) slots += of_ranks(a, layer, e);
  }
  const double rows = sum_of_block(slots) / static_cast<double>(a.chosen);
  for (int64_t e = threadIdx.x; e < a.experts; e += kThreads) {
    double chosen = 0, probability = 0;
    for (int64_t layer = 0; layer < a.layers; ++layer) {
      chosen += of_ranks(a, layer, e);
      probability += of_ranks(a, layer, a.experts + e);
    }
    a.fraction[e] = rows > 0 ? static_cast<float>(chosen / rows / rows) : 0.f;
    balance += rows > 0 ? chosen / rows * (probability / rows) : 0.0;
  }
  balance = static_cast<double>(a.experts) * sum_of_block(balance);
  const Loads mine = loads_of_warp(a);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Loads all = warps[0];
  for (int w = 1; w < kWarps; ++w) {
    all.most = max(all.most, warps[w].most);
    all.least = min(all.least, warps[w].least);
    all.entropy += warps[w].entropy;
  }
  RouterFigures out;
  if (rows > 0) out = {balance, all.most, all.least, all.entropy / rows / a.entropy_unit};
  *a.figures = out;
}

// A block per expert, whose rows its threads divide.
__global__ void weigh_factors(RouteFactors a) {
  const int e = static_cast<int>(blockIdx.x);
  double sum = 0;
  for (int64_t row = a.routing.start[e] + threadIdx.x; row < a.routing.start[e + 1]; row += kThreads) {
    const int32_t slot = a.routing.slot[row];
    const int64_t t = slot / a.chosen;
    const float* const p = a.probability + t * a.experts;
    float all = a.renormalise ? 0.f : 1.f;
    for (int64_t j = 0; a.renormalise && j < a.chosen; ++j) all += p[a.routing.expert[t * a.chosen + j]];
    sum += double{a.dweight[slot]} * double{p[e] / all};
    a.dweight[slot] *= a.factors[e];
  }
  if (a.gradient == nullptr) return;
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) a.gradient[e] = static_cast<float>(sum);
}

// A warp per token.
template <class T>
__global__ void balance(BalanceRoutes a) {
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (t >= a.tokens) return;
  const int64_t experts = a.dlogits.columns;
  const int lane = threadIdx.x % 32;
  const float* const p = a.probability + t * experts;
  T* const d = row_of<T>(a.dlogits, t);
  float mean = 0;
  for (int64_t e = lane; e < experts; e += 32) mean += a.fraction[e] * p[e];
  mean = warp_sum(mean);
  for (int64_t e = lane; e < experts; e += 32)
    d[e] = round_to<T>(to_float(d[e]) + a.factor * p[e] * (a.fraction[e] - mean));
}

}  // namespace

void gate_rows(const GateRows& a, StreamView stream) {
  with_dtype(a.x.dtype,
             [&](auto t) { launch(gate<decltype(t)>, blocks_of(a.x.rows, kRows), kThreads, stream, a); });
}

void route_factors(const RouteFactors& a, StreamView stream) {
  launch(weigh_factors, static_cast<unsigned>(a.experts), kThreads, stream, a);
}

void count_routes(const CountRoutes& a, StreamView stream) {
  LM_CHECK(a.start != nullptr && a.partial != nullptr, "a GPU counts choices by their rows, in a scratch");
  launch(count_range, dim3(kRouteChunks, blocks_of(a.probability.columns, 32)), kThreads, stream, a);
  launch(add_ranges, 1u, kThreads, stream, a);
}

void settle_routes(const SettleRoutes& a, StreamView stream) {
  launch(settle, 1u, kThreads, stream, a);
}

void balance_routes(const BalanceRoutes& a, StreamView stream) {
  with_dtype(a.dlogits.dtype,
             [&](auto t) { launch(balance<decltype(t)>, blocks_of(a.tokens, kWarps), kThreads, stream, a); });
}

}  // namespace lm::gpu
