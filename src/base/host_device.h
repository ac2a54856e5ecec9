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

// A bf16 number in memory, and an fp16 one.
struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
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
// For 31-bit numbers.
LM_HOST_DEVICE float select_less(uint32_t a, uint32_t b, float x, float y) {
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

// The number that fp16 bits stand for, and the bits nearest to a number (ties to even, every NaN 0x7E00,
// infinity from 65520 on), in the lower half. U: unsigned integers of 32 bits, or lanes of them. Subnormal
// ones come right by a multiplication, and by the addition of a number whose last bit is theirs.
template <class U>
LM_HOST_DEVICE auto fp16_value(U half) {
  using F = decltype(float_of(half));
  const U size = (half & U(0x7FFFu)) << 13, sign = (half & U(0x8000u)) << 16;
  const F finite = float_of(size) * F(0x1p112F), special = float_of(size | U(0x7F800000u));
  return float_of(bits_of(select_less(size, U(0x0F800000u), finite, special)) | sign);
}
template <class F>
LM_HOST_DEVICE auto fp16_nearest(F x) {
  using U = decltype(bits_of(x));
  const U bits = bits_of(x), size = bits & U(0x7FFFFFFFu), sign = (bits >> 16) & U(0x8000u);
  const U subnormal = bits_of(float_of(size) + F(0.5F)) - U(0x3F000000u);
  const U normal = (size + U(0xC8000FFFu) + ((size >> 13) & U(1u))) >> 13;
  const F finite = select_less(size, U(0x38800000u), float_of(subnormal), float_of(normal));
  const F number = select_less(size, U(0x47800000u), finite, float_of(U(0x7C00u)));
  return bits_of(select_less(U(0x7F800000u), size, float_of(U(0x7E00u)), float_of(bits_of(number) | sign)));
}
LM_HOST_DEVICE float to_float(Fp16 x) {
#if defined(__CUDA_ARCH__) && defined(__NVCC__)
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x.bits));
  return r;
#else
  return fp16_value(static_cast<uint32_t>(x.bits));
#endif
}
LM_HOST_DEVICE Fp16 to_fp16(float x) {
#if defined(__CUDA_ARCH__) && defined(__NVCC__)
  uint16_t r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
  return {static_cast<uint16_t>(x == x ? r : 0x7E00)};
#else
  return {static_cast<uint16_t>(fp16_nearest(x))};
#endif
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
LM_HOST_DEVICE void round_into(Fp16& to, float x) {
  to = to_fp16(x);
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
