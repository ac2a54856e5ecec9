// Sixty-four elements as four vectors, in a permuted ("turned") order that is the same for arrays of bytes,
// of halves and of words: for elementwise formulas. With AVX-512 it is the order in which bytes and halves
// unpack and pack within 128 bits, vector v having in its l-th 128 bits elements 8 * l + 4 * (v % 2) + 32 *
// (v / 2) and the three behind; widening 16 halves takes one operation in place of two, and packing them one
// in place of three. Otherwise it is the order in memory.
//
// Values only, as in lanes.h.
#pragma once

#include "kernels/master_formula.h"
#include "kernels/wide_lanes.h"

namespace lm::LM_ISA {

struct WideU32 {
  U32 of[kWide];
};
LM_INLINE WideU32 bits_of(Wide a) {
  WideU32 r;
  LM_UNROLL
  for (int v = 0; v < kWide; ++v) r.of[v] = bits_of(a.of[v]);
  return r;
}

#if defined(__AVX512F__)
// 128 bits each, of two vectors in a row.
LM_INLINE __m512i even_and_odd(__m512i a, __m512i b, bool odd) {
  return odd ? _mm512_maskz_shuffle_i64x2(0xFF, a, b, 0xDD) : _mm512_maskz_shuffle_i64x2(0xFF, a, b, 0x88);
}
LM_INLINE __m512i as_int(F32 a) {
  return (__m512i)a.part[0];
}
LM_INLINE F32 as_f32(__m512i a) {
  F32 r;
  r.part[0] = (NativeF32)a;
  return r;
}

LM_INLINE Wide turned(Wide a) {
  return wide_of(
      [&](int v) LM_BODY { return as_f32(even_and_odd(as_int(a.of[v & 2]), as_int(a.of[v | 1]), v & 1)); });
}
LM_INLINE Wide in_order(Wide a) {
  const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  return wide_of([&](int v) LM_BODY {
    return as_f32(
        _mm512_permutex2var_epi64(as_int(a.of[v & 2]), (v & 1) != 0 ? high : low, as_int(a.of[v | 1])));
  });
}

// Elements of 32 bits: `low` is the low half of each.
LM_INLINE Wide parted(const __m512i (&low)[2], const __m512i (&high)[2]) {
  return wide_of([&](int v) LM_BODY {
    return as_f32((v & 1) != 0 ? _mm512_unpackhi_epi16(low[v / 2], high[v / 2])
                               : _mm512_unpacklo_epi16(low[v / 2], high[v / 2]));
  });
}
LM_INLINE Wide load_turned(const Bf16* from) {
  const __m512i zero[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
  const __m512i high[2] = {_mm512_loadu_si512(from), _mm512_loadu_si512(from + 32)};
  return parted(zero, high);
}
// Loads split masters (master_formula.h) from their 16-bit halves.
LM_INLINE Wide load_turned_split(const uint16_t* weight, const uint16_t* low) {
  __m512i below[2], above[2];
  LM_UNROLL
  for (int half = 0; half < 2; ++half) {
    below[half] = _mm512_loadu_si512(low + 32 * half);
    above[half] =
        _mm512_sub_epi16(_mm512_loadu_si512(weight + 32 * half), _mm512_srli_epi16(below[half], 15));
  }
  return parted(below, above);
}
template <bool high>
LM_INLINE void store_turned_halves(uint16_t* to, WideU32 a) {
  alignas(64) static constexpr auto kWords = [] {
    struct {
      uint16_t at[32];
    } words = {};
    for (int i = 0; i < 32; ++i)
      words.at[i] = static_cast<uint16_t>(8 * (i / 8) + 2 * (i % 4) + (i % 8 < 4 ? 0 : 32) + high);
    return words;
  }();
  const __m512i words = _mm512_load_si512(kWords.at);
  LM_UNROLL
  for (int half = 0; half < 2; ++half) {
    _mm512_storeu_si512(to + 32 * half, _mm512_permutex2var_epi16((__m512i)a.of[2 * half].part[0], words,
                                                                  (__m512i)a.of[2 * half + 1].part[0]));
  }
}
#else
LM_INLINE Wide turned(Wide a) {
  return a;
}
LM_INLINE Wide in_order(Wide a) {
  return a;
}
LM_INLINE Wide load_turned(const Bf16* from) {
  return load(from, Whole4{});
}
LM_INLINE Wide load_turned_split(const uint16_t* weight, const uint16_t* low) {
  return wide_of([&](int v) LM_BODY {
    return float_of(split_join(load_u16(weight + v * kLanes, Whole{}), load_u16(low + v * kLanes, Whole{})));
  });
}
template <bool high>
LM_INLINE void store_turned_halves(uint16_t* to, WideU32 a) {
  LM_UNROLL
  for (int v = 0; v < kWide; ++v)
    store_u16(to + v * kLanes, high ? a.of[v] >> 16 : a.of[v] & U32(0xFFFF), Whole{});
}
#endif

LM_INLINE Wide load_turned(const float* from) {
  return turned(load(from, Whole4{}));
}
LM_INLINE void store_turned(float* to, Wide a) {
  store(to, in_order(a), Whole4{});
}
LM_INLINE Wide load_turned(const Fp16* from) {
  return turned(load(from, Whole4{}));
}
LM_INLINE void store_turned(Fp16* to, Wide a) {
  store(to, in_order(a), Whole4{});
}

}  // namespace lm::LM_ISA
