// The CPU launchers of one instruction set (namespace LM_ISA), and their shared helpers. Private to
// src/kernels; other code calls through the table of kernels.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/parallel.h"
#include "kernels/exponential.h"
#include "kernels/half_lanes.h"
#include "kernels/kernels.h"

namespace lm {

// Out of line and compiled once: throw Error(70) for types or arguments that a kernel does not support.
[[noreturn]] void refuse_dtype(const char* kernel, DType type);
[[noreturn]] void refuse_arguments(const char* kernel, const char* why);

namespace LM_ISA {

#define LM_KERNEL(name, Args) void name(const Args&, StreamView);
#define LM_CPU_KERNEL LM_KERNEL
#include "kernels/kernels.inc"
void gemm(const Gemm&, StreamView);  // bf16 and fp16
// The special cases of `update`: quantized state, 8-bit codes of the dynamic maps, factored second moments,
// and Muon's matrices.
void update_coded(const RuleUpdate&, StreamView);
void update_dynamic8(const RuleUpdate&, StreamView);
void update_factored(const RuleUpdate&, StreamView);
void update_muon(const RuleUpdate&, StreamView);

template <class T>
LM_INLINE T* row_of(const View& x, int64_t row) {
  return x.defined() ? static_cast<T*>(x.data) + row * x.stride : nullptr;
}

// Calls body(T{}) for the element type T of `type`.
template <class Body>
LM_INLINE void with_dtype(const char* kernel, DType type, const Body& body) {
  if (type == DType::kF32) return body(float{});
  if (type == DType::kBF16) return body(Bf16{});
  if (type == DType::kF16) return body(Fp16{});
  refuse_dtype(kernel, type);
}
// The same for the types that gradients are summed in.
template <class Body>
LM_INLINE void with_gradient_dtype(const char* kernel, DType type, const Body& body) {
  if (type == DType::kF32) return body(float{});
  if (type == DType::kBF16) return body(Bf16{});
  refuse_dtype(kernel, type);
}

// Below this many elements a thread costs more than it saves (waking one takes some microseconds).
inline constexpr int64_t kGrainElements = 16384;

// Rows per thread so that each has at least kGrainElements.
LM_INLINE int64_t row_grain(int64_t width) {
  return kGrainElements / (width > 0 ? width : 1) + 1;
}

// body(begin, end) on ranges of elements that start at multiples of 64: threads share no cache line, and the
// 64-number blocks of philox.h stay whole.
template <class Body>
LM_INLINE void parallel_elements(int threads, int64_t n, const Body& body) {
  parallel_for(threads, (n + 63) / 64, kGrainElements / 64,
               [&](int64_t begin, int64_t end) { body(begin * 64, end * 64 < n ? end * 64 : n); });
}

// sums[j] = sum of partial[b, j] over b in order.
LM_INLINE void sum_partials(const float* partial, int64_t blocks, int64_t width, float* sums) {
  each_vector(width, [&](int64_t j, auto count) LM_BODY {
    F32 sum = load(partial + j, count);
    for (int64_t b = 1; b < blocks; ++b) sum = sum + load(partial + b * width + j, count);
    store(sums + j, sum, count);
  });
}

}  // namespace LM_ISA
}  // namespace lm
