// Gated activations (SwiGLU, GeGLU, ...) on the GPU: a thread per 16 bytes of a row.
#include "kernels/activation_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

template <class T, int n, Activation kind>
__global__ void forward(GatedForward a) {
  const int64_t r = blockIdx.x, j = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n;
  if (j >= a.ffn) return;
  const T* gate = static_cast<const T*>(a.gate_up) + r * 2 * a.ffn + j;
  const Pack<T, n> g = load_pack<n>(gate), u = load_pack<n>(gate + a.ffn);
  Pack<T, n> h;
  for (int i = 0; i < n; ++i) h.at[i] = round_to<T>(gated<kind, T>(to_float(g.at[i]), to_float(u.at[i])));
  store_pack<n>(static_cast<T*>(a.out) + r * a.ffn + j, h);
}

template <class T, int n, Activation kind>
__global__ void backward(GatedBackward a) {
  const int64_t r = blockIdx.x, j = (static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x) * n;
  if (j >= a.ffn) return;
  T* gate = static_cast<T*>(a.gate_up) + r * 2 * a.ffn + j;
  T* dh = static_cast<T*>(a.dh) + r * a.ffn + j;
  Pack<T, n> g = load_pack<n>(gate), u = load_pack<n>(gate + a.ffn), d = load_pack<n>(dh);
  for (int i = 0; i < n; ++i) {
    float dgate = to_float(g.at[i]), dup = to_float(u.at[i]), h = to_float(d.at[i]);
    gated_backward_at<kind, T>(dgate, dup, h);
    d.at[i] = round_to<T>(h);
    u.at[i] = round_to<T>(dup);
    g.at[i] = round_to<T>(dgate);
  }
  store_pack<n>(dh, d);
  store_pack<n>(gate + a.ffn, u);
  store_pack<n>(gate, g);
}

template <int n>
dim3 grid_of(int64_t rows, int64_t ffn) {
  return dim3(static_cast<unsigned>(rows), blocks_of(ffn, int64_t{kThreads} * n));
}

}  // namespace

void gated_forward(const GatedForward& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    with_activation(a.activation, [&](auto activation) {
      using T = decltype(t);
      constexpr Activation kKind = decltype(activation)::value;
      if (a.ffn % kPack<T> == 0 && aligned(16, a.gate_up, a.out)) {
        return launch(forward<T, kPack<T>, kKind>, grid_of<kPack<T>>(a.rows, a.ffn), kThreads, stream, a);
      }
      launch(forward<T, 1, kKind>, grid_of<1>(a.rows, a.ffn), kThreads, stream, a);
    });
  });
}

void gated_backward(const GatedBackward& a, StreamView stream) {
  with_dtype(a.dtype, [&](auto t) {
    with_activation(a.activation, [&](auto activation) {
      using T = decltype(t);
      constexpr Activation kKind = decltype(activation)::value;
      if (a.ffn % kPack<T> == 0 && aligned(16, a.gate_up, a.dh)) {
        return launch(backward<T, kPack<T>, kKind>, grid_of<kPack<T>>(a.rows, a.ffn), kThreads, stream, a);
      }
      launch(backward<T, 1, kKind>, grid_of<1>(a.rows, a.ffn), kThreads, stream, a);
    });
  });
}

}  // namespace lm::gpu
