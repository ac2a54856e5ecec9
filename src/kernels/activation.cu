// Activations without a gate on the GPU: a thread per 16 bytes.
#include "kernels/activation_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

template <class T, int n, Activation kind>
__global__ void forward(ActivationForward a) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * n;
  if (i >= a.elements) return;
  const Pack<T, n> x = load_pack<n>(static_cast<const T*>(a.x) + i);
  float h[n], slope;
  for (int k = 0; k < n; ++k) h[k] = activated<kind>(to_float(x.at[k]), slope);
  store_rounded(static_cast<T*>(a.out) + i, h);
}

template <class T, int n, Activation kind>
__global__ void backward(ActivationBackward a) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * n;
  if (i >= a.elements) return;
  T* x = static_cast<T*>(a.x) + i;
  T* dh = static_cast<T*>(a.dh) + i;
  const Pack<T, n> v = load_pack<n>(x), d = load_pack<n>(dh);
  float dx[n], h[n];
  for (int k = 0; k < n; ++k) {
    dx[k] = to_float(v.at[k]), h[k] = to_float(d.at[k]);
    activation_backward_at<kind>(dx[k], h[k]);
  }
  store_rounded(x, dx);
  store_rounded(dh, h);
}

template <int n>
dim3 grid_of(int64_t elements) {
  return dim3(blocks_of(elements, int64_t{kThreads} * n));
}

}  // namespace

void activation_forward(const ActivationForward& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    with_activation(a.activation, [&](auto activation) {
      using T = decltype(t);
      constexpr Activation kKind = decltype(activation)::value;
      if (a.elements % kPack<T> == 0 && aligned(16, a.x, a.out)) {
        return launch(forward<T, kPack<T>, kKind>, grid_of<kPack<T>>(a.elements), kThreads, stream, a);
      }
      launch(forward<T, 1, kKind>, grid_of<1>(a.elements), kThreads, stream, a);
    });
  });
}

void activation_backward(const ActivationBackward& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    with_activation(a.activation, [&](auto activation) {
      using T = decltype(t);
      constexpr Activation kKind = decltype(activation)::value;
      if (a.elements % kPack<T> == 0 && aligned(16, a.x, a.dh)) {
        return launch(backward<T, kPack<T>, kKind>, grid_of<kPack<T>>(a.elements), kThreads, stream, a);
      }
      launch(backward<T, 1, kKind>, grid_of<1>(a.elements), kThreads, stream, a);
    });
  });
}

}  // namespace lm::gpu
