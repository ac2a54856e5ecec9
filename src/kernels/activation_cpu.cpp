// Activations without a gate on the CPU, one pass.
#include "kernels/activation_formula.h"
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

template <Activation kind, class T>
void forward_elements(const ActivationForward& a, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(a.x) + begin;
  T* out = static_cast<T*>(a.out) + begin;
  each_wide(end - begin, [&](int64_t i, auto count) LM_BODY {
    const auto v = load(x + i, count);
    std::remove_const_t<decltype(v)> slope;
    store(out + i, activated<kind>(v, slope), count);
  });
}

template <Activation kind, class T>
void backward_elements(const ActivationBackward& a, int64_t begin, int64_t end) {
  T* x = static_cast<T*>(a.x) + begin;
  T* dh = static_cast<T*>(a.dh) + begin;
  each_wide(end - begin, [&](int64_t i, auto count) LM_BODY {
    auto v = load(x + i, count), d = load(dh + i, count);
    activation_backward_at<kind>(v, d);
    store(dh + i, d, count);
    store(x + i, v, count);
  });
}

}  // namespace

void activation_forward(const ActivationForward& a, StreamView stream) {
  with_dtype("activation_forward", a.dtype, [&](auto t) {
    with_activation(a.activation, [&](auto kind) {
      parallel_elements(stream.threads, a.elements, [&](int64_t begin, int64_t end) {
        forward_elements<decltype(kind)::value, decltype(t)>(a, begin, end);
      });
    });
  });
}

void activation_backward(const ActivationBackward& a, StreamView stream) {
  with_dtype("activation_backward", a.dtype, [&](auto t) {
    with_activation(a.activation, [&](auto kind) {
      parallel_elements(stream.threads, a.elements, [&](int64_t begin, int64_t end) {
        backward_elements<decltype(kind)::value, decltype(t)>(a, begin, end);
      });
    });
  });
}

}  // namespace lm::LM_ISA
