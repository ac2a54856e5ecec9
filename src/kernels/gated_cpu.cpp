// Gated activations (SwiGLU, GeGLU, ...) on the CPU, one pass.
#include "kernels/activation_formula.h"
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

template <Activation kind, class T>
void forward_rows(const GatedForward& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* gate = static_cast<const T*>(a.gate_up) + r * 2 * a.ffn;
    const T* up = gate + a.ffn;
    T* out = static_cast<T*>(a.out) + r * a.ffn;
    each_wide(a.ffn, [&](int64_t j, auto count) LM_BODY {
      store(out + j, gated<kind, T>(load(gate + j, count), load(up + j, count)), count);
    });
  }
}

template <Activation kind, class T>
void backward_rows(const GatedBackward& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    T* gate = static_cast<T*>(a.gate_up) + r * 2 * a.ffn;
    T* up = gate + a.ffn;
    T* dh = static_cast<T*>(a.dh) + r * a.ffn;
    each_wide(a.ffn, [&](int64_t j, auto count) LM_BODY {
      auto g = load(gate + j, count), u = load(up + j, count), d = load(dh + j, count);
      gated_backward_at<kind, T>(g, u, d);
      store(dh + j, d, count);
      store(up + j, u, count);
      store(gate + j, g, count);
    });
  }
}

}  // namespace

void gated_forward(const GatedForward& a, StreamView stream) {
  with_dtype("gated_forward", a.dtype, [&](auto t) {
    with_activation(a.activation, [&](auto kind) {
      parallel_for(stream.threads, a.rows, row_grain(a.ffn), [&](int64_t begin, int64_t end) {
        forward_rows<decltype(kind)::value, decltype(t)>(a, begin, end);
      });
    });
  });
}

void gated_backward(const GatedBackward& a, StreamView stream) {
  with_dtype("gated_backward", a.dtype, [&](auto t) {
    with_activation(a.activation, [&](auto kind) {
      parallel_for(stream.threads, a.rows, row_grain(a.ffn), [&](int64_t begin, int64_t end) {
        backward_rows<decltype(kind)::value, decltype(t)>(a, begin, end);
      });
    });
  });
}

}  // namespace lm::LM_ISA
