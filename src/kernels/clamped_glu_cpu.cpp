// The clamped GLU on the CPU. Neighbours are taken apart, and put together again, a few hundred at a time.
#include "kernels/clamped_glu_formula.h"
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

constexpr int64_t kAtOnce = 256;

// Columns of gate and up that lie apart.
struct Columns {
  float gate[kAtOnce], up[kAtOnce];
};

template <class T>
LM_INLINE void take_apart(const T* both, int64_t n, Columns& out) {
  for (int64_t i = 0; i < n; ++i) {
    out.gate[i] = to_float(both[2 * i]);
    out.up[i] = to_float(both[2 * i + 1]);
  }
}

template <class T>
void forward_rows(const ClampedGluForward& a, int64_t begin, int64_t end) {
  const F32 alpha(a.alpha), limit(a.limit);
  Columns x;
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t first = 0; first < a.ffn; first += kAtOnce) {
      const int64_t n = a.ffn - first < kAtOnce ? a.ffn - first : kAtOnce;
      take_apart(static_cast<const T*>(a.gate_up) + 2 * (r * a.ffn + first), n, x);
      T* const out = static_cast<T*>(a.out) + r * a.ffn + first;
      each_vector(n, [&](int64_t j, auto count) LM_BODY {
        store(out + j, clamped_glu<F32>(load(x.gate + j, count), load(x.up + j, count), alpha, limit), count);
      });
    }
  }
}

template <class T>
void backward_rows(const ClampedGluBackward& a, int64_t begin, int64_t end) {
  const F32 alpha(a.alpha), limit(a.limit);
  Columns x;
  T dgate[kAtOnce], dup[kAtOnce];
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t first = 0; first < a.ffn; first += kAtOnce) {
      const int64_t n = a.ffn - first < kAtOnce ? a.ffn - first : kAtOnce;
      T* const both = static_cast<T*>(a.gate_up) + 2 * (r * a.ffn + first);
      T* const dh = static_cast<T*>(a.dh) + r * a.ffn + first;
      take_apart(both, n, x);
      each_vector(n, [&](int64_t j, auto count) LM_BODY {
        F32 gate = load(x.gate + j, count), up = load(x.up + j, count), d = load(dh + j, count);
        clamped_glu_backward_at(gate, up, d, alpha, limit);
        store(dgate + j, gate, count);
        store(dup + j, up, count);
        store(dh + j, d, count);
      });
      for (int64_t i = 0; i < n; ++i) both[2 * i] = dgate[i], both[2 * i + 1] = dup[i];
    }
  }
}

}  // namespace

void clamped_glu_forward(const ClampedGluForward& a, StreamView stream) {
  with_dtype("clamped_glu_forward", a.dtype, [&](auto t) {
    parallel_for(stream.threads, a.rows, row_grain(a.ffn),
                 [&](int64_t begin, int64_t end) { forward_rows<decltype(t)>(a, begin, end); });
  });
}

void clamped_glu_backward(const ClampedGluBackward& a, StreamView stream) {
  with_dtype("clamped_glu_backward", a.dtype, [&](auto t) {
    parallel_for(stream.threads, a.rows, row_grain(a.ffn),
                 [&](int64_t begin, int64_t end) { backward_rows<decltype(t)>(a, begin, end); });
  });
}

}  // namespace lm::LM_ISA
