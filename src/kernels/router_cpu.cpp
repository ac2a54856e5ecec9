// Around a mixture's experts, on the CPU: factors of a shared expert's rows, sums over a router's choices,
// and the gradient of its load's balance.
#include <cmath>

#include "base/expert_count.h"
#include "kernels/activation_formula.h"
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

template <class T>
void gate_some(const GateRows& a, int64_t begin, int64_t end) {
  const int64_t width = a.x.columns;
  for (int64_t r = begin; r < end; ++r) {
    T* const x = row_of<T>(a.x, r);
    const F32 factor = sigmoid(F32(to_float(*row_of<T>(a.gate, r))));
    if (a.other.defined()) {
      const T* const other = row_of<T>(a.other, r);
      F32 sums(0.f);
      each_vector(width, [&](int64_t j, auto count) LM_BODY {
        sums = sums + tail_or(load(x + j, count) * load(other + j, count), count, 0.f);
      });
      store(row_of<T>(a.dgate, r), F32(sum_lanes(sums)) * factor * (F32(1.f) - factor), Part{1});
    }
    each_vector(width,
                [&](int64_t j, auto count) LM_BODY { store(x + j, load(x + j, count) * factor, count); });
  }
}

template <class T>
void balance_some(const BalanceRoutes& a, int64_t begin, int64_t end) {
  const int64_t experts = a.dlogits.columns;
  for (int64_t t = begin; t < end; ++t) {
    const float* const p = a.probability + t * experts;
    T* const d = row_of<T>(a.dlogits, t);
    F32 sums(0.f);
    each_vector(experts, [&](int64_t j, auto count) LM_BODY {
      sums = sums + tail_or(load(a.fraction + j, count) * load(p + j, count), count, 0.f);
    });
    const F32 mean(sum_lanes(sums)), factor(a.factor);
    each_vector(experts, [&](int64_t j, auto count) LM_BODY {
      const F32 pushed = factor * load(p + j, count) * (load(a.fraction + j, count) - mean);
      store(d + j, load(d + j, count) + pushed, count);
    });
  }
}

}  // namespace

void gate_rows(const GateRows& a, StreamView stream) {
  with_dtype("gate_rows", a.x.dtype, [&](auto t) {
    parallel_for(stream.threads, a.x.rows, row_grain(a.x.columns),
                 [&](int64_t begin, int64_t end) { gate_some<decltype(t)>(a, begin, end); });
  });
}

// One thread: the sums' bits do not depend on how many there are, and beside the experts' products it is
// little.
void count_routes(const CountRoutes& a, StreamView /*stream*/) {
  const int64_t experts = a.probability.columns;
  double entropy = 0;
  for (int64_t t = 0; t < a.probability.rows; ++t) {
    const float* const p = row_of<float>(a.probability, t);
    double sum = a.scores ? 0 : 1;
    for (int64_t e = 0; a.scores && e < experts; ++e) sum += double{p[e]};
    for (int64_t e = 0; e < experts; ++e) {
      const double share = double{p[e]} / sum;
      a.sums.probability[e] += share;
      if (p[e] > 0) entropy -= share * (double{std::log(p[e])} - std::log(sum));
    }
    for (int64_t j = t * a.chosen; j < (t + 1) * a.chosen; ++j) a.sums.chosen[a.expert[j]] += 1;
  }
  *a.sums.entropy += entropy;
}

void balance_routes(const BalanceRoutes& a, StreamView stream) {
  with_dtype("balance_routes", a.dlogits.dtype, [&](auto t) {
    parallel_for(stream.threads, a.tokens, row_grain(a.dlogits.columns),
                 [&](int64_t begin, int64_t end) { balance_some<decltype(t)>(a, begin, end); });
  });
}

}  // namespace lm::LM_ISA
