// SwiGLU on the CPU, one pass.
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {

void swiglu_forward(const SwigluForward& a, StreamView stream) {
  with_dtype("swiglu_forward", a.dtype, [&](auto t) {
    using T = decltype(t);
    parallel_for(stream.threads, a.rows, row_grain(a.ffn), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        const T* gate = static_cast<const T*>(a.gate_up) + r * 2 * a.ffn;
        const T* up = gate + a.ffn;
        T* out = static_cast<T*>(a.out) + r * a.ffn;
        each_vector(a.ffn, [&](int64_t j, auto count) LM_BODY {
          const F32 x = load(gate + j, count);
          const F32 one(1.f), sigmoid = one / (one + exponential(F32(0.f) - x));
          const F32 silu = round_as<T>(x * sigmoid);  // with the backward pass bit for bit: h is made twice
          store(out + j, silu * load(up + j, count), count);
        });
      }
    });
  });
}

void swiglu_backward(const SwigluBackward& a, StreamView stream) {
  with_dtype("swiglu_backward", a.dtype, [&](auto t) {
    using T = decltype(t);
    parallel_for(stream.threads, a.rows, row_grain(a.ffn), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        T* gate = static_cast<T*>(a.gate_up) + r * 2 * a.ffn;
        T* up = gate + a.ffn;
        T* dh = static_cast<T*>(a.dh) + r * a.ffn;
        each_vector(a.ffn, [&](int64_t j, auto count) LM_BODY {
          const F32 x = load(gate + j, count), u = load(up + j, count), d = load(dh + j, count);
          const F32 one(1.f), sigmoid = one / (one + exponential(F32(0.f) - x));
          const F32 silu = round_as<T>(x * sigmoid);
          store(dh + j, silu * u, count);
          store(up + j, d * silu, count);
          store(gate + j, d * u * (sigmoid * (one + x * (one - sigmoid))), count);
        });
      }
    });
  });
}

}  // namespace lm::LM_ISA
