// Four F32 (lanes.h) at once, for formulas with an exponential or a division in them. Such a formula is one
// dependency chain of some hundred cycles, and a processor looks only about three chains ahead: interleaving
// four vectors per operation gives it independent chains. SwiGLU takes 0.75 of the time, its gradients 0.7,
// softmax's gradient 0.73 (AVX-512; AVX2: 0.77, 0.54, 0.79), and every element has the same bits as alone.
//
// Values only, as in lanes.h.
#pragma once

#include "kernels/half_lanes.h"

namespace lm::LM_ISA {

inline constexpr int kWide = 4;

struct Wide {
  F32 of[kWide];
  Wide() = default;
  explicit Wide(F32 a) {
    for (F32& v : of) v = a;
  }
  explicit Wide(float s) : Wide(F32(s)) {}
};

// value(0), value(1), ...
template <class Value>
LM_INLINE Wide wide_of(const Value& value) {
  Wide r;
  LM_UNROLL
  for (int i = 0; i < kWide; ++i) r.of[i] = value(i);
  return r;
}

LM_INLINE Wide operator+(Wide a, Wide b) {
  return wide_of([&](int i) LM_BODY { return a.of[i] + b.of[i]; });
}
LM_INLINE Wide operator-(Wide a, Wide b) {
  return wide_of([&](int i) LM_BODY { return a.of[i] - b.of[i]; });
}
LM_INLINE Wide operator*(Wide a, Wide b) {
  return wide_of([&](int i) LM_BODY { return a.of[i] * b.of[i]; });
}
LM_INLINE Wide operator/(Wide a, Wide b) {
  return wide_of([&](int i) LM_BODY { return a.of[i] / b.of[i]; });
}
LM_INLINE Wide multiply_add(Wide a, Wide b, Wide c) {
  return wide_of([&](int i) LM_BODY { return multiply_add(a.of[i], b.of[i], c.of[i]); });
}
LM_INLINE Wide max(Wide a, Wide b) {
  return wide_of([&](int i) LM_BODY { return max(a.of[i], b.of[i]); });
}
LM_INLINE Wide min(Wide a, Wide b) {
  return wide_of([&](int i) LM_BODY { return min(a.of[i], b.of[i]); });
}
LM_INLINE Wide select_less(Wide a, Wide b, Wide x, Wide y) {
  return wide_of([&](int i) LM_BODY { return select_less(a.of[i], b.of[i], x.of[i], y.of[i]); });
}
LM_INLINE Wide power_of_two(Wide shifted) {
  return wide_of([&](int i) LM_BODY { return power_of_two(shifted.of[i]); });
}
// rounded_upper() for vectors that rarely have a NaN: one test for all, then three operations per vector in
// place of five.
LM_INLINE Wide rounded_upper(Wide a) {
#if defined(__AVX512F__)
  const auto nan = [&](int i) LM_BODY {
    return _mm512_cmp_ps_mask((__m512)a.of[i].part[0], (__m512)a.of[i + 1].part[0], _CMP_UNORD_Q);
  };
  if (__builtin_expect((nan(0) | nan(2)) == 0, 1)) {
    return wide_of([&](int i) LM_BODY {
      const auto bits = (__m512i)a.of[i].part[0];
      const __mmask16 odd = _mm512_mask_test_epi32_mask(0xFFFF, bits, _mm512_set1_epi32(0x10000));
      const __m512i half = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF));
      F32 r;
      r.part[0] = (NativeF32)_mm512_mask_add_epi32(half, odd, half, _mm512_set1_epi32(1));
      return r;
    });
  }
#endif
  return wide_of([&](int i) LM_BODY { return float_of(rounded_upper(a.of[i])); });
}
template <class T>
LM_INLINE Wide round_as(Wide a) {
  if constexpr (std::is_same_v<T, float>) return a;
  if constexpr (std::is_same_v<T, Fp16>) {
    return wide_of([&](int i) LM_BODY { return round_as<T>(a.of[i]); });
  }
  const Wide rounded = rounded_upper(a);
  return wide_of([&](int i) LM_BODY { return float_of(bits_of(rounded.of[i]) & U32(0xFFFF0000)); });
}

// The count of a load or store that touches all lanes of a Wide.
struct Whole4 {};
LM_INLINE Wide load(const float* from, Whole4) {
  return wide_of([&](int i) LM_BODY { return load(from + i * kLanes, Whole{}); });
}
LM_INLINE void store(float* to, Wide a, Whole4) {
  LM_UNROLL
  for (int i = 0; i < kWide; ++i) store(to + i * kLanes, a.of[i], Whole{});
}
LM_INLINE Wide load(const Bf16* from, Whole4) {
  return wide_of([&](int i) LM_BODY { return load(from + i * kLanes, Whole{}); });
}
LM_INLINE void store(Bf16* to, Wide a, Whole4) {
#if defined(__AVX512BW__)
  // Takes the upper halves of two vectors by one operation, where shifting and narrowing each would take six.
  typedef uint16_t Halves __attribute__((vector_size(64)));
  const Wide rounded = rounded_upper(a);
  LM_UNROLL
  for (int i = 0; i < kWide; i += 2) {
    const Halves upper = __builtin_shufflevector(
        (Halves)rounded.of[i].part[0], (Halves)rounded.of[i + 1].part[0], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19,
        21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
    _mm512_storeu_si512(to + i * kLanes, (__m512i)upper);
  }
#else
  LM_UNROLL
  for (int i = 0; i < kWide; ++i) store(to + i * kLanes, a.of[i], Whole{});
#endif
}
LM_INLINE Wide load(const Fp16* from, Whole4) {
  return wide_of([&](int i) LM_BODY { return load(from + i * kLanes, Whole{}); });
}
LM_INLINE void store(Fp16* to, Wide a, Whole4) {
  LM_UNROLL
  for (int i = 0; i < kWide; ++i) store(to + i * kLanes, a.of[i], Whole{});
}

// a + b's vectors in order: the same sum as each_vector's, in order.
LM_INLINE F32 add_in_order(F32 a, Wide b) {
  LM_UNROLL
  for (int i = 0; i < kWide; ++i) a = a + b.of[i];
  return a;
}
LM_INLINE F32 add_in_order(F32 a, F32 b) {
  return a + b;
}
LM_INLINE Wide tail_or(Wide a, Whole4, float) {
  return a;
}

// Like each_vector, with body(first, Whole4) while enough elements are left.
template <class Body>
LM_INLINE void each_wide(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kWide * kLanes <= n; i += kWide * kLanes) body(i, Whole4{});
  for (; i + kLanes <= n; i += kLanes) body(i, Whole{});
  if (i < n) body(i, Part{static_cast<int>(n - i)});
}

}  // namespace lm::LM_ISA
