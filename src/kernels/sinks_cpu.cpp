// Attention sinks on the CPU: a thread has some heads of all tokens.
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

template <class T>
void add_some(const AddSinks& a, int64_t begin, int64_t end) {
  for (int64_t h = begin; h < end; ++h) {
    const float z = to_float(static_cast<const T*>(a.sinks)[h]);
    for (int64_t t = 0; t < a.tokens; ++t) {
      float& lse = a.lse[h * a.tokens + t];
      // log(e^lse + e^z) from the larger one: the other's exponential is at most 1.
      const float most = lse > z ? lse : z, least = lse > z ? z : lse;
      const float sum = most + __builtin_log1pf(__builtin_expf(least - most));
      const F32 factor(__builtin_expf(lse - sum));
      T* const out = static_cast<T*>(a.out) + (t * a.heads + h) * a.head_dim;
      each_vector(a.head_dim, [&](int64_t j, auto count)
                                  LM_BODY { store(out + j, load(out + j, count) * factor, count); });
      lse = sum;
    }
  }
}

template <class T>
void sum_some(const SinksGradient& a, int64_t begin, int64_t end) {
  for (int64_t h = begin; h < end; ++h) {
    const float z = to_float(static_cast<const T*>(a.sinks)[h]);
    double sum = 0;
    for (int64_t t = 0; t < a.tokens; ++t) {
      const int64_t at = (t * a.heads + h) * a.head_dim;
      const T* const out = static_cast<const T*>(a.out) + at;
      const T* const dout = static_cast<const T*>(a.dout) + at;
      F32 dots(0.f);
      each_vector(a.head_dim, [&](int64_t j, auto count) LM_BODY {
        dots = dots + tail_or(load(out + j, count) * load(dout + j, count), count, 0.f);
      });
      sum -= double{__builtin_expf(z - a.lse[h * a.tokens + t])} * double{sum_lanes(dots)};
    }
    a.gradient[h] = static_cast<float>(sum);
  }
}

}  // namespace

void add_sinks(const AddSinks& a, StreamView stream) {
  with_dtype("add_sinks", a.dtype, [&](auto t) {
    parallel_for(stream.threads, a.heads, row_grain(a.tokens * a.head_dim),
                 [&](int64_t begin, int64_t end) { add_some<decltype(t)>(a, begin, end); });
  });
}

void sinks_gradient(const SinksGradient& a, StreamView stream) {
  with_dtype("sinks_gradient", a.dtype, [&](auto t) {
    parallel_for(stream.threads, a.heads, row_grain(a.tokens * a.head_dim),
                 [&](int64_t begin, int64_t end) { sum_some<decltype(t)>(a, begin, end); });
  });
}

}  // namespace lm::LM_ISA
