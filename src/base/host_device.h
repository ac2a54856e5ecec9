// Formulas that both launchers of a kernel share are written once, as templates over the value type (float on
// the GPU and in tests, 16 lanes in the CPU loops), with LM_HOST_DEVICE. Pure functions: no memory, any
// thread.
//
// Internal linkage on purpose: a CPU source is compiled once per instruction set, and the linker must never
// take the AVX-512 copy of a shared inline function for the baseline.
#pragma once

#include <cstdint>
#include <cstring>

#define LM_INLINE static inline __attribute__((always_inline))
#if defined(__CUDACC__)
#define LM_HOST_DEVICE static __host__ __device__ __forceinline__
#define LM_UNROLL _Pragma("unroll")
#else
#define LM_HOST_DEVICE LM_INLINE
#define LM_UNROLL _Pragma("GCC unroll 16")
#endif

namespace lm {

// A bf16 number in memory.
struct Bf16 {
  uint16_t bits;
};

LM_HOST_DEVICE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
LM_HOST_DEVICE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline constexpr uint32_t kNan = 0x7FC00000;  // the only NaN that kernels with fixed bits store

// The scalar forms of the operations that shared formulas use besides + - * /; lanes.h has the same names.
LM_HOST_DEVICE float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
LM_HOST_DEVICE float root(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}
LM_HOST_DEVICE float exponential(float a) {
#if defined(__CUDA_ARCH__)
  return expf(a);
#else
  return __builtin_expf(a);
#endif
}
LM_HOST_DEVICE float exponential_to_infinity(float a) {
  return exponential(a);
}
LM_HOST_DEVICE float select_less(float a, float b, float x, float y) {
  return a < b ? x : y;
}
LM_HOST_DEVICE float one_nan(float a) {
  return a == a ? a : float_of(kNan);
}
LM_HOST_DEVICE uint32_t mul_high(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

LM_HOST_DEVICE float to_float(float x) {
  return x;
}
LM_HOST_DEVICE float to_float(Bf16 x) {
  return float_of(static_cast<uint32_t>(x.bits) << 16);
}

// Nearest even; every NaN becomes 0x7FC0.
LM_HOST_DEVICE Bf16 to_bf16(float x) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(x == x ? rounded : 0x7FC0)};
}
LM_HOST_DEVICE void round_into(float& to, float x) {
  to = x;
}
LM_HOST_DEVICE void round_into(Bf16& to, float x) {
  to = to_bf16(x);
}
template <class T>
LM_HOST_DEVICE T round_to(float x) {
  T r;
  round_into(r, x);
  return r;
}
// The value that a store of type T would leave.
template <class T>
LM_HOST_DEVICE float round_as(float x) {
  return to_float(round_to<T>(x));
}

}  // namespace lm
