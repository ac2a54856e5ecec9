// Routing of tokens to experts on the CPU.
#include <cstring>

#include "base/batch.h"
#include "base/expert_count.h"
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

template <class T>
void softmax(const T* logits, int64_t n, float* out) {
  F32 largest(-__builtin_inff());
  each_vector(n, [&](int64_t j, auto count) LM_BODY {
    largest = max(largest, tail_or(load(logits + j, count), count, -__builtin_inff()));
  });
  const F32 top(max_lanes(largest));
  F32 sums(0.f);
  each_vector(n, [&](int64_t j, auto count) LM_BODY {
    const F32 e = exponential(load(logits + j, count) - top);
    store(out + j, e, count);
    sums = sums + tail_or(e, count, 0.f);
  });
  const F32 sum(sum_lanes(sums));
  each_vector(n, [&](int64_t j, auto count) LM_BODY { store(out + j, load(out + j, count) / sum, count); });
}

// The k largest, in descending order. With NaNs among them still k different ones.
template <class T>
void choose(const T* logits, int64_t n, int64_t k, int32_t* out) {
  uint64_t taken[kMostExperts / 64] = {};
  for (int64_t j = 0; j < k; ++j) {
    int64_t best = -1;
    float most = 0;
    for (int64_t e = 0; e < n; ++e) {
      if ((taken[e / 64] >> (e % 64) & 1) != 0) continue;
      const float logit = to_float(logits[e]);
      if (best < 0 || logit > most) best = e, most = logit;
    }
    taken[best / 64] |= uint64_t{1} << (best % 64);
    out[j] = static_cast<int32_t>(best);
  }
}

// Of one token: the probabilities of what it has chosen, in order, and their sum.
LM_INLINE float chosen_sum(const float* probability, const int32_t* expert, int64_t k) {
  float sum = 0;
  for (int64_t j = 0; j < k; ++j) sum += probability[expert[j]];
  return sum;
}

template <class T>
void route_some(const RouteTokens& a, int64_t begin, int64_t end) {
  const int64_t experts = a.logits.columns, k = a.chosen;
  for (int64_t t = begin; t < end; ++t) {
    const T* const logits = row_of<T>(a.logits, t);
    float* const p = a.probability + t * experts;
    int32_t* const expert = a.routing.expert + t * k;
    softmax(logits, experts, p);
    choose(logits, experts, k, expert);
    const float sum = a.renormalise ? chosen_sum(p, expert, k) : 1.f;
    for (int64_t j = 0; j < k; ++j) {
      float weight = p[expert[j]] / sum;
      if (a.round) {
        T rounded;
        store(&rounded, F32(weight), Part{1});
        weight = to_float(rounded);
      }
      a.routing.weight[t * k + j] = weight;
    }
  }
}

// Stable: an expert's rows are in the order of the tokens.
void sort_slots(const RouteTokens& a) {
  const Routing& r = a.routing;
  const int64_t experts = a.logits.columns, slots = a.tokens * a.chosen;
  int32_t next[kMostExperts] = {};
  for (int64_t s = 0; s < slots; ++s) ++next[r.expert[s]];
  r.start[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const bool pads = a.pad && next[e] > 0;
    const auto rows = pads ? static_cast<int32_t>(rounded_rows(next[e])) : next[e];
    r.start[e + 1] = r.start[e] + rows;
    for (int32_t row = r.start[e] + next[e]; row < r.start[e + 1]; ++row) r.slot[row] = -1, r.token[row] = 0;
    next[e] = r.start[e];
  }
  for (int64_t s = 0; s < slots; ++s) {
    const int32_t row = next[r.expert[s]]++;
    r.row[s] = row;
    r.slot[row] = static_cast<int32_t>(s);
    r.token[row] = static_cast<int32_t>(s / a.chosen);
  }
}

template <class T>
void write_gradient(const RouteBackward& a, int64_t t, float* d) {
  const int64_t experts = a.dlogits.columns, k = a.chosen;
  const float* const p = a.probability + t * experts;
  const float* const g = a.dweight + t * k;
  const int32_t* const expert = a.routing.expert + t * k;
  const float sum = a.renormalise ? chosen_sum(p, expert, k) : 1.f;
  float mean = 0;
  for (int64_t j = 0; j < k; ++j) mean += p[expert[j]] / sum * g[j];
  for (int64_t e = 0; e < experts; ++e) d[e] = a.renormalise ? 0.f : -p[e] * mean;
  for (int64_t j = 0; j < k; ++j) {
    const float w = p[expert[j]] / sum;
    d[expert[j]] = w * (g[j] - mean);
  }
  T* const out = row_of<T>(a.dlogits, t);
  each_vector(experts, [&](int64_t j, auto count) LM_BODY { store(out + j, load(d + j, count), count); });
}

template <class T>
void weigh_some(const WeighRows& a, int64_t begin, int64_t end) {
  const int64_t width = a.x.columns;
  for (int64_t r = begin; r < end; ++r) {
    T* const x = row_of<T>(a.x, r);
    const int32_t slot = a.routing.slot[r];
    if (slot < 0) {
      memset(x, 0, static_cast<size_t>(width) * sizeof(T));
      continue;
    }
    if (a.other.defined()) {
      const T* const other = row_of<T>(a.other, r);
      F32 sums(0.f);
      each_vector(width, [&](int64_t j, auto count) LM_BODY {
        sums = sums + tail_or(load(x + j, count) * load(other + j, count), count, 0.f);
      });
      a.dot[slot] = sum_lanes(sums);
    }
    const F32 weight(a.routing.weight[slot]);
    each_vector(width,
                [&](int64_t j, auto count) LM_BODY { store(x + j, load(x + j, count) * weight, count); });
  }
}

template <class T>
void combine_some(const CombineRows& a, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    T* const out = row_of<T>(a.out, t);
    const T* const addend = row_of<T>(a.addend, t);
    const int64_t slots = t < a.tokens ? a.chosen : 0;
    each_vector(a.out.columns, [&](int64_t j, auto count) LM_BODY {
      F32 sum(0.f);
      for (int64_t s = t * a.chosen; s < t * a.chosen + slots; ++s) {
        const F32 x = load(row_of<T>(a.x, a.routing.row[s]) + j, count);
        sum = sum + (a.weighted ? F32(a.routing.weight[s]) * x : x);
      }
      store(out + j, addend != nullptr ? load(addend + j, count) + sum : sum, count);
    });
  }
}

}  // namespace

void route_tokens(const RouteTokens& a, StreamView stream) {
  if (a.logits.columns > kMostExperts) refuse_arguments("route_tokens", "too many experts");
  with_dtype("route_tokens", a.logits.dtype, [&](auto t) {
    parallel_for(stream.threads, a.tokens, row_grain(a.logits.columns * a.chosen),
                 [&](int64_t begin, int64_t end) { route_some<decltype(t)>(a, begin, end); });
  });
  sort_slots(a);
}

void route_backward(const RouteBackward& a, StreamView stream) {
  const int64_t experts = a.dlogits.columns;
  if (experts > kMostExperts) refuse_arguments("route_backward", "too many experts");
  with_dtype("route_backward", a.dlogits.dtype, [&](auto t) {
    using T = decltype(t);
    parallel_for(stream.threads, a.dlogits.rows, row_grain(experts), [&](int64_t begin, int64_t end) {
      float d[kMostExperts];
      for (int64_t r = begin; r < end; ++r) {
        if (r < a.tokens)
          write_gradient<T>(a, r, d);
        else
          memset(row_of<T>(a.dlogits, r), 0, static_cast<size_t>(experts) * sizeof(T));
      }
    });
  });
}

void weigh_rows(const WeighRows& a, StreamView stream) {
  with_dtype("weigh_rows", a.x.dtype, [&](auto t) {
    parallel_for(stream.threads, a.x.rows, row_grain(a.x.columns),
                 [&](int64_t begin, int64_t end) { weigh_some<decltype(t)>(a, begin, end); });
  });
}

void combine_rows(const CombineRows& a, StreamView stream) {
  with_dtype("combine_rows", a.out.dtype, [&](auto t) {
    parallel_for(stream.threads, a.out.rows, row_grain(a.out.columns * (a.chosen + 1)),
                 [&](int64_t begin, int64_t end) { combine_some<decltype(t)>(a, begin, end); });
  });
}

}  // namespace lm::LM_ISA
