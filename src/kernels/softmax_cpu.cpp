// Softmax cross-entropy on the CPU, and the scale and cap of logits before it, a vocabulary segment at a
// time. The two passes of the statistics read a row of a segment (16 KB in bf16) once from memory, once from
// L1.
#include <cmath>
#include <type_traits>

#include "kernels/block_formula.h"
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

// As many elements as V has lanes.
template <class V, class T>
LM_INLINE void prefetch(const T* from) {
  constexpr int64_t kLine = 64 / sizeof(T);
  LM_UNROLL
  for (int64_t j = 0; j < static_cast<int64_t>(sizeof(V) / sizeof(float)); j += kLine)
    __builtin_prefetch(from + j);
}

template <class T>
void statistics_row(const SoftmaxStatistics& a, int64_t r) {
  const T* x = static_cast<const T*>(a.logits) + r * a.stride;
  const float infinity = __builtin_inff();
  const int64_t column = a.target[r] - a.first_column;
  // The columns left of the target come first: one of them that has the largest logit is the argmax.
  const int64_t left = column < 0 || column > a.columns ? a.columns : column;
  F32 largest(-infinity);
  each_vector(left, [&](int64_t j, auto count)
                        LM_BODY { largest = max(largest, tail_or(load(x + j, count), count, -infinity)); });
  const float left_max = max_lanes(largest);
  each_vector(a.columns - left, [&](int64_t j, auto count) LM_BODY {
    largest = max(largest, tail_or(load(x + left + j, count), count, -infinity));
  });
  const float old_max = a.first_segment ? -infinity : a.max[r];
  const float segment_max = max_lanes(largest);
  const float new_max = old_max < segment_max ? segment_max : old_max;
  F32 sums(0.f);
  // The exponentials read L1, so memory can bring the next row meanwhile: 9 % faster than without.
  each_wide(a.columns, [&](int64_t j, auto count) LM_BODY {
    const auto logit = load(x + j, count);
    using V = std::remove_const_t<decltype(logit)>;
    prefetch<V>(x + a.stride + j);
    sums = add_in_order(sums, tail_or(exponential(logit - V(new_max)), count, 0.f));
  });
  const float carried = a.first_segment ? 0.f : a.sum[r] * std::exp(old_max - new_max);
  a.max[r] = new_max;
  a.sum[r] = carried + sum_lanes(sums);
  const bool here = column >= 0 && column < a.columns;
  if (here) a.target_logit[r] = to_float(x[column]);
  if (a.correct == nullptr) return;
  // Of a target in an earlier segment, a larger logit here ends that it is the argmax.
  const bool earlier = column < 0 && !a.first_segment && a.correct[r] != 0 && new_max == old_max;
  const bool first = here && to_float(x[column]) == new_max && old_max < new_max && left_max < new_max;
  a.correct[r] = earlier || first ? 1.F : 0.F;
}

template <class T>
void scale_row(const CapLogits& a, int64_t r) {
  T* x = static_cast<T*>(a.logits) + r * a.stride;
  const F32 scale(a.scale);
  each_vector(a.columns,
              [&](int64_t j, auto count) LM_BODY { store(x + j, load(x + j, count) * scale, count); });
}

template <class T>
void cap_row(const CapLogits& a, int64_t r) {
  T* x = static_cast<T*>(a.logits) + r * a.stride;
  const float cap = a.cap, ratio = a.scale / cap;
  each_wide(a.columns, [&](int64_t j, auto count) LM_BODY {
    const auto logit = load(x + j, count);
    using V = std::remove_const_t<decltype(logit)>;
    store(x + j, soft_cap(logit, V(ratio), V(cap)), count);
  });
}

// The gradient of one vector of logits, or of four.
template <bool capped, class V>
LM_INLINE V gradient_of(V logit, float lse, float is_target, float scale, float cap) {
  const V gradient = lm::softmax_gradient(logit, V(lse), V(is_target), V(scale));
  if constexpr (capped) return gradient * soft_cap_slope(logit, V(cap), V(1 / (cap * cap)));
  return gradient;
}

template <class T, bool capped>
void gradient_row(const SoftmaxGradient& a, int64_t r) {
  T* x = static_cast<T*>(a.logits) + r * a.stride;
  const float lse = a.max[r] + std::log(a.sum[r]), cap = a.logit_cap;
  const float scale = (a.weight == nullptr ? a.scale : a.scale * a.weight[r]) * a.logit_scale;
  const int64_t column = a.target[r] - a.first_column;
  const bool here = column >= 0 && column < a.columns;
  const float target = here ? to_float(x[column]) : 0.f;
  each_wide(a.columns, [&](int64_t j, auto count) LM_BODY {
    store(x + j, gradient_of<capped>(load(x + j, count), lse, 0.f, scale, cap), count);
  });
  if (!here) return;
  float lane[kLanes];
  store(lane, gradient_of<capped>(F32(target), lse, 1.f, scale, cap), Whole{});
  x[column] = round_to<T>(lane[0]);
}

}  // namespace

void cap_logits(const CapLogits& a, StreamView stream) {
  with_dtype("cap_logits", a.dtype, [&](auto t) {
    parallel_for(stream.threads, a.rows, row_grain(a.columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (a.cap > 0) {
          cap_row<decltype(t)>(a, r);
        } else {
          scale_row<decltype(t)>(a, r);
        }
      }
    });
  });
}

void softmax_statistics(const SoftmaxStatistics& a, StreamView stream) {
  with_dtype("softmax_statistics", a.dtype, [&](auto t) {
    parallel_for(stream.threads, a.rows, row_grain(a.columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) statistics_row<decltype(t)>(a, r);
    });
  });
}

void softmax_gradient(const SoftmaxGradient& a, StreamView stream) {
  with_dtype("softmax_gradient", a.dtype, [&](auto t) {
    parallel_for(stream.threads, a.rows, row_grain(a.columns), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (a.logit_cap > 0) {
          gradient_row<decltype(t), true>(a, r);
        } else {
          gradient_row<decltype(t), false>(a, r);
        }
      }
    });
  });
}

void softmax_loss(const SoftmaxLoss& a, StreamView) {
  double total = 0, correct = 0;
  for (int64_t r = 0; r < a.rows; ++r) {
    const float nll = a.max[r] + std::log(a.sum[r]) - a.target_logit[r];
    if (a.correct != nullptr) correct += static_cast<double>(a.correct[r]);
    if (a.nll != nullptr) a.nll[r] = nll;
    // Exact, as a product of two fp32 numbers is in fp64.
    total += static_cast<double>(nll) * (a.weight == nullptr ? 1.F : a.weight[r]);
  }
  *a.total += total;
  if (a.correct_total != nullptr) *a.correct_total += correct;
}

}  // namespace lm::LM_ISA
