// Softmax cross-entropy on the GPU, a block per row of a vocabulary segment; and the scale and cap of logits
// before it, a thread per 16 bytes.
#include "kernels/block_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

// Packs that a thread has under way at a time.
constexpr int kPacks = 4;
// Elements between two packs of a thread.
template <int n>
inline constexpr int64_t kStep = int64_t{kThreads} * n;

// e^x for x <= 0 in five instructions. x * log2(e) is rounded, which moves the result by x * 6e-8 of itself:
// at most 2.2e-8 beside a largest term of 1.
__device__ __forceinline__ float exp_below_zero(float x) {
  return exp2f(x * 1.44269504088896341f);
}

// Logits that one thread has seen: the largest, the largest left of the row's target, and the sum of
// exp(logit - largest), scaled when a larger one comes. Of a number and a NaN fmaxf is the number; the sum is
// a NaN then.
struct Running {
  float largest = float_of(0xFF800000), left = float_of(0xFF800000), sum = 0;  // -inf

  // The packs at x and every kStep behind it; the first `until` columns from x on lie left of the target.
  template <int n, int packs, class T>
  __device__ __forceinline__ void add(const T* x, int64_t until) {
    Loaded<T, n> v[packs];
    for (int p = 0; p < packs; ++p) v[p] = load<n>(x + p * kStep<n>);
    float logit[packs][n], next = largest;
    for (int p = 0; p < packs; ++p) {
      unpack<T>(v[p], logit[p]);
      float most = logit[p][0];
      for (int i = 1; i < n; ++i) most = fmaxf(most, logit[p][i]);
      next = fmaxf(next, most);
      const int64_t rest = until - p * kStep<n>;
      if (rest >= n) left = fmaxf(left, most);
      if (rest <= 0 || rest >= n) continue;
      for (int i = 0; i < n; ++i) {
        if (i < rest) left = fmaxf(left, logit[p][i]);
      }
    }
    const float base = next == float_of(0xFF800000) ? 0.f : next;  // -inf - -inf is no number
    sum *= exp_below_zero(largest - base);
    for (int p = 0; p < packs; ++p) {
      for (int i = 0; i < n; ++i) sum += exp_below_zero(logit[p][i] - base);
    }
    largest = next;
  }
};

template <class T, int n>
__global__ void cap(CapLogits a) {
  const int64_t r = blockIdx.x, j = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n;
  if (j >= a.columns) return;
  T* x = static_cast<T*>(a.logits) + r * a.stride + j;
  const Loaded<T, n> v = load<n>(x);
  float logit[n];
  unpack<T>(v, logit);
  if (a.cap > 0) {
    const float ratio = a.scale / a.cap;
    for (int i = 0; i < n; ++i) logit[i] = soft_cap(logit[i], ratio, a.cap);
  } else {
    for (int i = 0; i < n; ++i) logit[i] *= a.scale;
  }
  store_rounded(x, logit);
}

template <class T, int n>
__global__ void statistics(SoftmaxStatistics a) {
  // Per warp: has one of its threads seen a logit left of the target that is as large as the row's largest?
  __shared__ bool beaten[kThreads / 32];
  const int64_t r = blockIdx.x;
  const T* x = static_cast<const T*>(a.logits) + r * a.stride;
  const float infinity = __int_as_float(0x7F800000);
  // Read before the barriers of the reductions; thread 0 writes after them.
  const float old_max = a.first_segment ? -infinity : a.max[r];
  const int64_t column = a.target[r] - a.first_column;
  const bool here = column >= 0 && column < a.columns;
  const int64_t left = here ? column : 0;
  Running own;
  int64_t j = int64_t{threadIdx.x} * n;
  for (; j + (kPacks - 1) * kStep<n> < a.columns; j += kPacks * kStep<n>) own.add<n, kPacks>(x + j, left - j);
  for (; j < a.columns; j += kStep<n>) own.add<n, 1>(x + j, left - j);
  const float largest = block_max(own.largest);
  const float new_max = old_max < largest ? largest : old_max;
  const bool any = __ballot_sync(0xFFFFFFFFu, here && own.left == new_max) != 0;
  if (threadIdx.x % 32 == 0) beaten[threadIdx.x / 32] = any;  // read behind block_sum's barriers
  // A row of -inf alone has no sum: NaN.
  const float sum = block_sum(own.sum * exp_below_zero(own.largest - new_max));
  if (threadIdx.x != 0) return;
  const float carried = a.first_segment ? 0.f : a.sum[r] * expf(old_max - new_max);
  a.max[r] = new_max;
  a.sum[r] = carried + sum;
  const float logit = here ? to_float(x[column]) : 0.f;
  if (here) a.target_logit[r] = logit;
  if (a.correct == nullptr) return;
  // Of a target in an earlier segment, a larger logit here ends that it is the argmax.
  const bool earlier = column < 0 && !a.first_segment && a.correct[r] != 0 && new_max == old_max;
  bool first = here && logit == new_max && old_max < new_max;
  for (const bool warp : beaten) first = first && !warp;
  a.correct[r] = earlier || first ? 1.f : 0.f;
}

// The packs at column j of row r and every kStep behind it, all loaded before the row's logarithm is made.
template <class T, int n, int packs>
__device__ __forceinline__ void gradient_at(const SoftmaxGradient& a, int64_t r, int64_t j) {
  T* x = static_cast<T*>(a.logits) + r * a.stride + j;
  Loaded<T, n> v[packs];
  for (int p = 0; p < packs; ++p) v[p] = load<n>(x + p * kStep<n>);
  const float lse = a.max[r] + logf(a.sum[r]);
  const float scale = (a.weight == nullptr ? a.scale : a.scale * a.weight[r]) * a.logit_scale;
  const int64_t target = a.target[r] - a.first_column - j;
  LM_UNROLL
  for (int p = 0; p < packs; ++p) {
    float logit[n], d[n];
    unpack<T>(v[p], logit);
    for (int i = 0; i < n; ++i) d[i] = lm::softmax_gradient(logit[i], lse, 0.f, scale);
    if (target >= p * kStep<n> && target < p * kStep<n> + n) {
      for (int i = 0; i < n; ++i) {
        if (p * kStep<n> + i == target) d[i] = lm::softmax_gradient(logit[i], lse, 1.f, scale);
      }
    }
    if (a.logit_cap > 0) {
      const float inverse = 1 / (a.logit_cap * a.logit_cap);
      for (int i = 0; i < n; ++i) d[i] *= soft_cap_slope(logit[i], a.logit_cap, inverse);
    }
    store_rounded(x + p * kStep<n>, d);
  }
}

template <class T, int n>
__global__ void gradient(SoftmaxGradient a) {
  const int64_t first = blockIdx.y * kPacks * kStep<n> + int64_t{threadIdx.x} * n;
  if (first + (kPacks - 1) * kStep<n> < a.columns) return gradient_at<T, n, kPacks>(a, blockIdx.x, first);
  for (int64_t j = first; j < a.columns; j += kStep<n>) gradient_at<T, n, 1>(a, blockIdx.x, j);
}

// One block; thread 0 adds the terms of each batch in row order.
__global__ void loss(SoftmaxLoss a) {
  __shared__ double term[kThreads];
  double total = 0;
  float correct = 0;
  for (int64_t first = 0; first < a.rows; first += kThreads) {
    const int64_t r = first + threadIdx.x;
    if (r < a.rows) {
      const float nll = a.max[r] + logf(a.sum[r]) - a.target_logit[r];
      if (a.nll != nullptr) a.nll[r] = nll;
      if (a.correct != nullptr) correct += a.correct[r];
      term[threadIdx.x] = static_cast<double>(nll) * (a.weight == nullptr ? 1.f : a.weight[r]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      const int count = static_cast<int>(min(a.rows - first, int64_t{kThreads}));
      for (int i = 0; i < count; ++i) total += term[i];
    }
    __syncthreads();
  }
  correct = block_sum(correct);  // whole numbers below 2^24: exact in any order
  if (threadIdx.x == 0) {
    *a.total += total;
    if (a.correct_total != nullptr) *a.correct_total += correct;
  }
}

}  // namespace

void cap_logits(const CapLogits& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    const unsigned rows = static_cast<unsigned>(a.rows);
    if (a.columns % kPack<T> == 0 && a.stride % kPack<T> == 0 && aligned(16, a.logits)) {
      return launch(cap<T, kPack<T>>, dim3(rows, blocks_of(a.columns, kThreads * kPack<T>)), kThreads, stream,
                    a);
    }
    launch(cap<T, 1>, dim3(rows, blocks_of(a.columns, kThreads)), kThreads, stream, a);
  });
}

void softmax_statistics(const SoftmaxStatistics& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    const unsigned grid = static_cast<unsigned>(a.rows);
    if (a.columns % kPack<T> == 0 && a.stride % kPack<T> == 0 && aligned(16, a.logits)) {
      return launch(statistics<T, kPack<T>>, grid, kThreads, stream, a);
    }
    launch(statistics<T, 1>, grid, kThreads, stream, a);
  });
}

void softmax_gradient(const SoftmaxGradient& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    using T = decltype(t);
    const unsigned rows = static_cast<unsigned>(a.rows);
    if (a.columns % kPack<T> == 0 && a.stride % kPack<T> == 0 && aligned(16, a.logits)) {
      return launch(gradient<T, kPack<T>>, dim3(rows, blocks_of(a.columns, kThreads * kPack<T> * kPacks)),
                    kThreads, stream, a);
    }
    launch(gradient<T, 1>, dim3(rows, blocks_of(a.columns, kThreads * kPacks)), kThreads, stream, a);
  });
}

void softmax_loss(const SoftmaxLoss& a, StreamView stream) {
  launch(loss, 1, kThreads, stream, a);
}

}  // namespace lm::gpu
