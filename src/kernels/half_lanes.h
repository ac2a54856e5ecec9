// Loads and stores of sixteen bf16 or fp16 numbers, rounded to nearest even, and what a store of a type
// leaves.
//
// Values only, as in lanes.h.
#pragma once

#include <type_traits>

#include "kernels/lanes.h"

namespace lm::LM_ISA {

// bf16 bits of each lane, to nearest even, NaN as 0x7FC0, in the upper half; the lower one is undefined.
LM_INLINE U32 rounded_upper(F32 a) {
  const U32 bits = bits_of(a);
#if defined(__AVX512F__)
  // With masks four operations instead of six: rounding is half of the work of a pass over bf16.
  const __m512i b = (__m512i)bits.part[0];
  const __mmask16 number = _mm512_cmp_ps_mask((__m512)a.part[0], (__m512)a.part[0], _CMP_ORD_Q);
  const __mmask16 odd = _mm512_mask_test_epi32_mask(number, b, _mm512_set1_epi32(0x10000));
  U32 rounded(kNan);
  rounded.part[0] =
      (NativeU32)_mm512_mask_add_epi32((__m512i)rounded.part[0], number, b, _mm512_set1_epi32(0x7FFF));
  rounded.part[0] =
      (NativeU32)_mm512_mask_add_epi32((__m512i)rounded.part[0], odd, b, _mm512_set1_epi32(0x8000));
  return rounded;
#else
  const U32 rounded = bits + U32(0x7FFF) + ((bits >> 16) & U32(1));
  return bits_of(select_nan(a, float_of(U32(kNan)), float_of(rounded)));
#endif
}
// In the lower half, zeros above.
LM_INLINE U32 bf16_bits(F32 a) {
  return rounded_upper(a) >> 16;
}
template <class Count>
LM_INLINE F32 load(const Bf16* from, Count count) {
  return float_of(load_u16(&from->bits, count) << 16);
}
template <class Count>
LM_INLINE void store(Bf16* to, F32 a, Count count) {
  store_u16(&to->bits, bf16_bits(a), count);
}

// fp16: processors with AVX2 have instructions for it, which round to nearest even as asked.
LM_INLINE F32 load(const Fp16* from, Whole) {
  F32 r;
#if defined(__AVX512F__)
  r.part[0] =
      (NativeF32)_mm512_maskz_cvtph_ps(0xFFFF, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  for (int p = 0; p < kParts; ++p)
    r.part[p] =
        (NativeF32)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + p * kNative)));
#else
  r = fp16_value(load_u16(&from->bits, Whole{}));
#endif
  return r;
}
LM_INLINE F32 load(const Fp16* from, Part count) {
  Fp16 whole[kLanes] = {};
  memcpy(whole, from, sizeof(Fp16) * static_cast<size_t>(count.n));
  return load(whole, Whole{});
}
LM_INLINE void store(Fp16* to, F32 a, Whole) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_maskz_cvtps_ph(0xFFFF, (__m512)one_nan(a).part[0],
                                            _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  a = one_nan(a);
  for (int p = 0; p < kParts; ++p)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + p * kNative),
                     _mm256_cvtps_ph((__m256)a.part[p], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  store_u16(&to->bits, fp16_nearest(a), Whole{});
#endif
}
LM_INLINE void store(Fp16* to, F32 a, Part count) {
  Fp16 whole[kLanes];
  store(whole, a, Whole{});
  memcpy(to, whole, sizeof(Fp16) * static_cast<size_t>(count.n));
}

// For values that are already rounded.
template <class Count>
LM_INLINE void store_rounded(Bf16* to, F32 a, Count count) {
  store_u16(&to->bits, bits_of(a) >> 16, count);
}
template <class Count>
LM_INLINE void store_rounded(float* to, F32 a, Count count) {
  store(to, a, count);
}
template <class Count>
LM_INLINE void store_rounded(Fp16* to, F32 a, Count count) {
  store(to, a, count);
}

// The value that a store of type T would leave.
template <class T>
LM_INLINE F32 round_as(F32 a) {
  if constexpr (std::is_same_v<T, Bf16>) return float_of(rounded_upper(a) & U32(0xFFFF0000));
  if constexpr (std::is_same_v<T, Fp16>) {
    Fp16 rounded[kLanes];
    store(rounded, a, Whole{});
    return load(rounded, Whole{});
  }
  return a;
}

}  // namespace lm::LM_ISA
