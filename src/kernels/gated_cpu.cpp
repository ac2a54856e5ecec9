// SwiGLU on the CPU, one pass.
#include "kernels/block_formula.h"
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {

void gated_forward(const GatedForward& a, StreamView stream) {
  with_dtype("gated_forward", a.dtype, [&](auto t) {
    using T = decltype(t);
    parallel_for(stream.threads, a.rows, row_grain(a.ffn), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* gate = static_cast<const T*>(a.gate_up) + r * 2 * a.ffn;
        const T* up = gate + a.ffn;
        T* out = static_cast<T*>(a.out) + r * a.ffn;
        each_wide(a.ffn, [&](int64_t j, auto count) LM_BODY {
          store(out + j, swiglu<T>(load(gate + j, count), load(up + j, count)), count);
        });
      }
    });
  });
}

void gated_backward(const GatedBackward& a, StreamView stream) {
  with_dtype("gated_backward", a.dtype, [&](auto t) {
    using T = decltype(t);
    parallel_for(stream.threads, a.rows, row_grain(a.ffn), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* gate = static_cast<T*>(a.gate_up) + r * 2 * a.ffn;
        T* up = gate + a.ffn;
        T* dh = static_cast<T*>(a.dh) + r * a.ffn;
        each_wide(a.ffn, [&](int64_t j, auto count) LM_BODY {
          auto g = load(gate + j, count), u = load(up + j, count), d = load(dh + j, count);
          gated_backward_at<T>(g, u, d);
          store(dh + j, d, count);
          store(up + j, u, count);
          store(gate + j, g, count);
        });
      }
    });
  });
}

}  // namespace lm::LM_ISA
