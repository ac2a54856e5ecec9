// Routing of tokens to experts on the CPU.
#include <cstring>

#include "base/batch.h"
#include "base/expert_count.h"
#include "kernels/activation_formula.h"
#include "kernels/cpu_launchers.h"
#include "kernels/route_formula.h"

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

// Experts outside the best groups cannot be chosen any more.
void leave_groups(const RouteScores& scores, int64_t experts, float* choice) {
  const int64_t each = experts / scores.groups;
  float sums[kMostExperts] = {};
  int32_t best[kMostExperts];
  for (int64_t g = 0; g < scores.groups; ++g)
    sums[g] = two_largest(static_cast<int>(each), [&](int e) { return choice[g * each + e]; });
  choose(sums, scores.groups, scores.kept_groups, best);
  for (int64_t g = 0; g < scores.groups; ++g) {
    bool kept = false;
    for (int64_t i = 0; i < scores.kept_groups; ++i) kept = kept || best[i] == g;
    for (int64_t e = g * each; !kept && e < (g + 1) * each; ++e) choice[e] = -__builtin_inff();
  }
}

// s = sigmoid(logits), and the choice by s + correction.
template <class T>
void choose_by_scores(const RouteTokens& a, const T* logits, float* s, int32_t* out) {
  const int64_t experts = a.logits.columns;
  float choice[kMostExperts];
  each_vector(experts, [&](int64_t j, auto count) LM_BODY {
    const F32 score = sigmoid(F32(load(logits + j, count)));
    store(s + j, score, count);
    store(choice + j, score + F32(load(a.scores.correction + j, count)), count);
  });
  if (a.scores.groups > 1) leave_groups(a.scores, experts, choice);
  choose(choice, experts, a.chosen, out);
}

// What the chosen ones' probabilities or scores are divided by.
template <class Args>
LM_INLINE float divisor(const Args& a, const float* p, const int32_t* expert) {
  if (!a.renormalise) return 1.f;
  return chosen_sum(p, expert, a.chosen) + (a.scores.sigmoid ? kLeastScores : 0.f);
}

template <class T>
void route_some(const RouteTokens& a, int64_t begin, int64_t end) {
  const int64_t experts = a.logits.columns, k = a.chosen;
  for (int64_t t = begin; t < end; ++t) {
    const T* const logits = row_of<T>(a.logits, t);
    float* const p = a.probability + t * experts;
    int32_t* const expert = a.routing.expert + t * k;
    if (a.scores.sigmoid) {
      choose_by_scores(a, logits, p, expert);
    } else {
      softmax(logits, experts, p);
      choose(logits, experts, k, expert);
    }
    const float sum = divisor(a, p, expert);
    for (int64_t j = 0; j < k; ++j) {
      float weight = p[expert[j]] / sum;
      if (a.scores.sigmoid) weight *= a.scores.scale;
      if (a.factors != nullptr) weight *= a.factors[expert[j]];
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

// Of one token; a choice has no gradient, and so no correction has one.
void gradient_of_sigmoid(const RouteBackward& a, int64_t t, float* d) {
  const int64_t experts = a.dlogits.columns, k = a.chosen;
  const float* const s = a.probability + t * experts;
  const float* const g = a.dweight + t * k;
  const int32_t* const expert = a.routing.expert + t * k;
  const float sum = divisor(a, s, expert);
  float mean = 0;
  for (int64_t j = 0; a.renormalise && j < k; ++j) mean += s[expert[j]] / sum * g[j];
  for (int64_t e = 0; e < experts; ++e) d[e] = 0.f;
  for (int64_t j = 0; j < k; ++j) {
    const float score = s[expert[j]];
    d[expert[j]] = a.scores.scale / sum * (g[j] - mean) * score * (1.f - score);
  }
}

void gradient_of_softmax(const RouteBackward& a, int64_t t, float* d) {
  const int64_t experts = a.dlogits.columns, k = a.chosen;
  const float* const p = a.probability + t * experts;
  const float* const g = a.dweight + t * k;
  const int32_t* const expert = a.routing.expert + t * k;
  const float sum = divisor(a, p, expert);
  float mean = 0;
  for (int64_t j = 0; j < k; ++j) mean += p[expert[j]] / sum * g[j];
  for (int64_t e = 0; e < experts; ++e) d[e] = a.renormalise ? 0.f : -p[e] * mean;
  for (int64_t j = 0; j < k; ++j) {
    const float w = p[expert[j]] / sum;
    d[expert[j]] = w * (g[j] - mean);
  }
}

template <class T>
void write_gradient(const RouteBackward& a, int64_t t, float* d) {
  if (a.scores.sigmoid)
    gradient_of_sigmoid(a, t, d);
  else
    gradient_of_softmax(a, t, d);
  T* const out = row_of<T>(a.dlogits, t);
  each_vector(a.dlogits.columns,
              [&](int64_t j, auto count) LM_BODY { store(out + j, load(d + j, count), count); });
}

template <class T>
void weigh_some(const WeighRows& a, int64_t begin, int64_t end) {
  const int64_t width = a.x.columns;
  for (int64_t r = begin; r < end; ++r) {
    T* const x = row_of<T>(a.x, r);
    const int64_t slot = a.routing.slot == nullptr ? r : a.routing.slot[r];
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

void route_factors(const RouteFactors& a, StreamView /*stream*/) {
  if (a.experts > kMostExperts) refuse_arguments("route_factors", "too many experts");
  double sums[kMostExperts] = {};
  for (int64_t t = 0; t < a.tokens; ++t) {
    const float* const p = a.probability + t * a.experts;
    const int32_t* const expert = a.routing.expert + t * a.chosen;
    float* const g = a.dweight + t * a.chosen;
    const float sum = a.renormalise ? chosen_sum(p, expert, a.chosen) : 1.f;
    for (int64_t j = 0; j < a.chosen; ++j) {
      const int32_t e = expert[j];
      sums[e] += double{g[j]} * double{p[e] / sum};
      g[j] *= a.factors[e];
    }
  }
  for (int64_t e = 0; e < a.experts && a.gradient != nullptr; ++e)
    a.gradient[e] = static_cast<float>(sums[e]);
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
