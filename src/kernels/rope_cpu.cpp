// Rotary embedding on the CPU, in place.
#include "kernels/block_formula.h"
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

template <class T>
void rotate_rows(const Rope& a, int64_t begin, int64_t end) {
  const int64_t half = a.head_dim / 2;
  const F32 sign(a.inverse ? -1.f : 1.f);
  for (int64_t r = begin; r < end; ++r) {
    const float* cos = a.cos + a.position[r] * half;
    const float* sin = a.sin + a.position[r] * half;
    for (int64_t h = 0; h < a.heads; ++h) {
      T* low = static_cast<T*>(a.x) + r * a.x_stride + h * a.head_dim;
      T* high = low + half;
      each_vector(half, [&](int64_t i, auto count) LM_BODY {
        const F32 c = load(cos + i, count), s = load(sin + i, count) * sign;
        F32 x = load(low + i, count), y = load(high + i, count);
        rope_turn(c, s, x, y);
        store(low + i, x, count);
        store(high + i, y, count);
      });
    }
  }
}

}  // namespace

void rope(const Rope& a, StreamView stream) {
  with_dtype("rope", a.dtype, [&](auto t) {
    parallel_for(stream.threads, a.rows, row_grain(a.heads * a.head_dim),
                 [&](int64_t begin, int64_t end) { rotate_rows<decltype(t)>(a, begin, end); });
  });
}

}  // namespace lm::LM_ISA
