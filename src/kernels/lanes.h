// Sixteen fp32 lanes for the CPU kernels. A source that includes this is compiled once per instruction set
// into its own namespace (LM_ISA: baseline, avx2, avx512); sixteen lanes are one register on AVX-512, two on
// AVX2, four on the baseline, so every reduction adds in the same order and gives the same bits on each.
//
// Values only, no memory is owned. Loads and stores take any alignment; `Part` is the tail of an array.
#pragma once

#include "base/host_device.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifndef LM_ISA
#define LM_ISA baseline
#endif

namespace lm::LM_ISA {

inline constexpr int kLanes = 16;
#if defined(__AVX512F__)
inline constexpr int kNative = 16;
#elif defined(__AVX2__)
inline constexpr int kNative = 8;
#else
inline constexpr int kNative = 4;
#endif
inline constexpr int kParts = kLanes / kNative;

typedef float NativeF32 __attribute__((vector_size(4 * kNative)));
typedef int32_t NativeI32 __attribute__((vector_size(4 * kNative)));
typedef uint32_t NativeU32 __attribute__((vector_size(4 * kNative)));
typedef uint64_t NativeU64 __attribute__((vector_size(4 * kNative)));
typedef uint16_t NativeU16 __attribute__((vector_size(2 * kNative)));
// In memory, at any alignment. (Not memcpy: gcc 12 joins the copies of neighbouring parts into 16-byte moves
// over the stack, and the 32-byte loads from there stall: rope on AVX2 took six times as long.)
typedef float MemoryF32 __attribute__((vector_size(4 * kNative), aligned(4), may_alias));
typedef uint16_t MemoryU16 __attribute__((vector_size(2 * kNative), aligned(2), may_alias));

struct U32 {
  NativeU32 part[kParts];
  U32() = default;
  explicit U32(uint32_t s) {
    for (auto& p : part) p = NativeU32{} + s;
  }
};
struct F32 {
  NativeF32 part[kParts];
  F32() = default;
  explicit F32(float s) {
    for (auto& p : part) p = NativeF32{} + s;  // -0 becomes 0: no formula broadcasts it
  }
};

LM_INLINE F32 operator+(F32 a, F32 b) {
  for (int p = 0; p < kParts; ++p) a.part[p] += b.part[p];
  return a;
}
LM_INLINE F32 operator-(F32 a, F32 b) {
  for (int p = 0; p < kParts; ++p) a.part[p] -= b.part[p];
  return a;
}
LM_INLINE F32 operator*(F32 a, F32 b) {
  for (int p = 0; p < kParts; ++p) a.part[p] *= b.part[p];
  return a;
}
LM_INLINE F32 operator/(F32 a, F32 b) {
  for (int p = 0; p < kParts; ++p) a.part[p] /= b.part[p];
  return a;
}
LM_INLINE U32 operator+(U32 a, U32 b) {
  for (int p = 0; p < kParts; ++p) a.part[p] += b.part[p];
  return a;
}
LM_INLINE U32 operator-(U32 a, U32 b) {
  for (int p = 0; p < kParts; ++p) a.part[p] -= b.part[p];
  return a;
}
LM_INLINE U32 operator*(U32 a, U32 b) {
  for (int p = 0; p < kParts; ++p) a.part[p] *= b.part[p];
  return a;
}
LM_INLINE U32 operator&(U32 a, U32 b) {
  for (int p = 0; p < kParts; ++p) a.part[p] &= b.part[p];
  return a;
}
LM_INLINE U32 operator|(U32 a, U32 b) {
  for (int p = 0; p < kParts; ++p) a.part[p] |= b.part[p];
  return a;
}
LM_INLINE U32 operator^(U32 a, U32 b) {
  for (int p = 0; p < kParts; ++p) a.part[p] ^= b.part[p];
  return a;
}
LM_INLINE U32 operator<<(U32 a, int n) {
  for (int p = 0; p < kParts; ++p) a.part[p] <<= n;
  return a;
}
LM_INLINE U32 operator>>(U32 a, int n) {
  for (int p = 0; p < kParts; ++p) a.part[p] >>= n;
  return a;
}

// 0, 1, ... 15.
LM_INLINE U32 lane_numbers() {
  uint32_t lane[kLanes];
  for (uint32_t l = 0; l < kLanes; ++l) lane[l] = l;
  U32 r;
  memcpy(&r, lane, sizeof r);
  return r;
}

LM_INLINE U32 bits_of(F32 a) {
  U32 r;
  for (int p = 0; p < kParts; ++p) r.part[p] = (NativeU32)a.part[p];
  return r;
}
LM_INLINE F32 float_of(U32 a) {
  F32 r;
  for (int p = 0; p < kParts; ++p) r.part[p] = (NativeF32)a.part[p];
  return r;
}

// a < b ? x : y; a comparison with NaN is false.
LM_INLINE F32 select_less(F32 a, F32 b, F32 x, F32 y) {
  for (int p = 0; p < kParts; ++p) x.part[p] = a.part[p] < b.part[p] ? x.part[p] : y.part[p];
  return x;
}
// a < b ? x : y for 31-bit numbers.
LM_INLINE F32 select_less(U32 a, U32 b, F32 x, F32 y) {
  for (int p = 0; p < kParts; ++p) {
    x.part[p] = (NativeI32)a.part[p] < (NativeI32)b.part[p] ? x.part[p] : y.part[p];
  }
  return x;
}
// NaN ? x : y.
LM_INLINE F32 select_nan(F32 a, F32 x, F32 y) {
  for (int p = 0; p < kParts; ++p) x.part[p] = a.part[p] != a.part[p] ? x.part[p] : y.part[p];
  return x;
}
// The larger (smaller) one; b where either is NaN.
LM_INLINE F32 max(F32 a, F32 b) {
#if defined(__AVX512F__)
  b.part[0] = _mm512_maskz_max_ps(0xFFFF, a.part[0], b.part[0]);
#elif defined(__AVX2__)
  for (int p = 0; p < kParts; ++p) b.part[p] = _mm256_max_ps(a.part[p], b.part[p]);
#else
  b = select_less(b, a, a, b);
#endif
  return b;
}
LM_INLINE F32 min(F32 a, F32 b) {
#if defined(__AVX512F__)
  b.part[0] = _mm512_maskz_min_ps(0xFFFF, a.part[0], b.part[0]);
#elif defined(__AVX2__)
  for (int p = 0; p < kParts; ++p) b.part[p] = _mm256_min_ps(a.part[p], b.part[p]);
#else
  b = select_less(a, b, a, b);
#endif
  return b;
}
LM_INLINE F32 one_nan(F32 a) {
  return select_nan(a, float_of(U32(kNan)), a);
}

LM_INLINE F32 fused(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  c.part[0] = _mm512_fmadd_ps(a.part[0], b.part[0], c.part[0]);
#elif defined(__AVX2__)
  for (int p = 0; p < kParts; ++p) c.part[p] = _mm256_fmadd_ps(a.part[p], b.part[p], c.part[p]);
#else  // libm's exact one: the bits matter more here than the time
  for (int p = 0; p < kParts; ++p) {
    NativeF32 sum = c.part[p];
    for (int l = 0; l < kNative; ++l) sum[l] = __builtin_fmaf(a.part[p][l], b.part[p][l], sum[l]);
    c.part[p] = sum;
  }
#endif
  return c;
}
// (All-ones mask: as in mul_high.)
// a * b + c, fused if the processor can: for results that need not have the same bits everywhere.
LM_INLINE F32 multiply_add(F32 a, F32 b, F32 c) {
  if constexpr (kNative > 4) return fused(a, b, c);
  return a * b + c;
}
// 1.5 * 2^23: added to a number it leaves the nearest integer in the low bits.
inline constexpr float kIntegerShift = 12582912.f;
// 2^n, of n + kIntegerShift.
LM_INLINE F32 power_of_two(F32 shifted) {
  return float_of((bits_of(shifted) + U32(127)) << 23);
}
LM_INLINE F32 root(F32 a) {
#if defined(__AVX512F__)
  a.part[0] = _mm512_maskz_sqrt_ps(0xFFFF, a.part[0]);
#elif defined(__AVX2__)
  for (int p = 0; p < kParts; ++p) a.part[p] = _mm256_sqrt_ps(a.part[p]);
#else
  for (int p = 0; p < kParts; ++p) {
    for (int l = 0; l < kNative; ++l) a.part[p][l] = __builtin_sqrtf(a.part[p][l]);
  }
#endif
  return a;
}

// The upper halves of the 64-bit products. (The all-ones mask folds away; without it gcc 12 warns of an
// uninitialised operand.)
LM_INLINE U32 mul_high(U32 a, U32 b) {
  for (int p = 0; p < kParts; ++p) {
#if defined(__AVX512F__)
    const NativeU64 x = (NativeU64)a.part[p], y = (NativeU64)b.part[p];
    const NativeU64 even = (NativeU64)_mm512_maskz_mul_epu32(0xFF, (__m512i)x, (__m512i)y);
    const NativeU64 odd = (NativeU64)_mm512_maskz_mul_epu32(0xFF, (__m512i)(x >> 32), (__m512i)(y >> 32));
    a.part[p] = (NativeU32)_mm512_mask_blend_epi32(0xAAAA, (__m512i)(even >> 32), (__m512i)odd);
#elif defined(__AVX2__)
    const NativeU64 x = (NativeU64)a.part[p], y = (NativeU64)b.part[p];
    const NativeU64 even = (NativeU64)_mm256_mul_epu32((__m256i)x, (__m256i)y);
    const NativeU64 odd = (NativeU64)_mm256_mul_epu32((__m256i)(x >> 32), (__m256i)(y >> 32));
    a.part[p] = (NativeU32)_mm256_blend_epi32((__m256i)(even >> 32), (__m256i)odd, 0xAA);
#else
    for (int l = 0; l < kNative; ++l)
      a.part[p][l] = lm::mul_high(uint32_t{a.part[p][l]}, uint32_t{b.part[p][l]});
#endif
  }
  return a;
}

// Sixteen 4-bit numbers out of 8 bytes, the high half of each byte first.
LM_INLINE U32 load_halves(const uint8_t* from) {
  U32 r;
#if defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), _mm_set1_epi8(15));
  const __m128i each = _mm_unpacklo_epi8(high, _mm_and_si128(bytes, _mm_set1_epi8(15)));
#if defined(__AVX512F__)
  r.part[0] = (NativeU32)_mm512_maskz_cvtepu8_epi32(0xFFFF, each);
#else
  r.part[0] = (NativeU32)_mm256_cvtepu8_epi32(each);
  r.part[1] = (NativeU32)_mm256_cvtepu8_epi32(_mm_srli_si128(each, 8));
#endif
#else
  for (int l = 0; l < kLanes; ++l)
    r.part[l / kNative][l % kNative] = l % 2 == 0 ? from[l / 2] >> 4 : from[l / 2] & 15;
#endif
  return r;
}
// table[index] for each lane; indices are below 16.
LM_INLINE F32 look_up(const F32& table, U32 index) {
  F32 r;
#if defined(__AVX512F__)
  r.part[0] = (NativeF32)_mm512_maskz_permutexvar_ps(0xFFFF, (__m512i)index.part[0], (__m512)table.part[0]);
#elif defined(__AVX2__)
  for (int p = 0; p < kParts; ++p) {
    const __m256i i = (__m256i)index.part[p];
    const __m256 low = _mm256_permutevar8x32_ps((__m256)table.part[0], i);
    const __m256 high = _mm256_permutevar8x32_ps((__m256)table.part[1], i);
    r.part[p] = (NativeF32)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
  }
#else
  float lane[kLanes];
  memcpy(lane, table.part, sizeof lane);
  for (int l = 0; l < kLanes; ++l)
    r.part[l / kNative][l % kNative] = lane[index.part[l / kNative][l % kNative]];
#endif
  return r;
}

// The number of lanes of a load or store.
struct Whole {};
struct Part {
  int n;  // 1..15; the other lanes load as 0
};

// gcc 12 emits five instructions for a generic conversion between 16 and 32 bits; the processors have one.
LM_INLINE U32 load_u16(const uint16_t* from, Whole) {
  U32 r;
  for (int p = 0; p < kParts; ++p) {
    const NativeU16 v = *reinterpret_cast<const MemoryU16*>(from + p * kNative);
#if defined(__AVX512F__)
    r.part[p] = (NativeU32)_mm512_maskz_cvtepu16_epi32(0xFFFF, (__m256i)v);
#elif defined(__AVX2__)
    r.part[p] = (NativeU32)_mm256_cvtepu16_epi32((__m128i)v);
#else
    r.part[p] = __builtin_convertvector(v, NativeU32);
#endif
  }
  return r;
}
// Each lane must be below 65536.
LM_INLINE void store_u16(uint16_t* to, U32 a, Whole) {
  for (int p = 0; p < kParts; ++p) {
#if defined(__AVX512F__)
    const NativeU16 v = (NativeU16)_mm512_maskz_cvtepi32_epi16(0xFFFF, (__m512i)a.part[p]);
#elif defined(__AVX2__)
    const __m256i wide = (__m256i)a.part[p];
    const NativeU16 v =
        (NativeU16)_mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
#else
    const NativeU16 v = __builtin_convertvector(a.part[p], NativeU16);
#endif
    *reinterpret_cast<MemoryU16*>(to + p * kNative) = v;
  }
}
// Whole vectors only. Each lane must be below 256.
LM_INLINE U32 load_u8(const uint8_t* from) {
  U32 r;
  for (int p = 0; p < kParts; ++p) {
#if defined(__AVX512F__)
    r.part[p] = (NativeU32)_mm512_maskz_cvtepu8_epi32(0xFFFF, _mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
    r.part[p] = (NativeU32)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(from + p * kNative)));
#else
    for (int l = 0; l < kNative; ++l) r.part[p][l] = from[p * kNative + l];
#endif
  }
  return r;
}
LM_INLINE void store_u8(uint8_t* to, U32 a) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_maskz_cvtepi32_epi8(0xFFFF, (__m512i)a.part[0]));
#elif defined(__AVX2__)
  const __m256i halves =
      _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a.part[0], (__m256i)a.part[1]), 0xD8);
  _mm_storeu_si128((__m128i*)to,
                   _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
#else
  for (int p = 0; p < kParts; ++p) {
    for (int l = 0; l < kNative; ++l) to[p * kNative + l] = (uint8_t)a.part[p][l];
  }
#endif
}

// Sixteen 4-bit numbers into 8 bytes, the high half of each byte first.
LM_INLINE void store_halves(uint8_t* to, U32 a) {
  uint8_t each[kLanes];
  store_u8(each, a);
  for (int half = 0; half < 2; ++half) {
    uint64_t x;
    memcpy(&x, each + 8 * half, sizeof x);
    x = (x << 4 | x >> 8) & 0x00FF00FF00FF00FF;
    x = (x | x >> 8) & 0x0000FFFF0000FFFF;
    const auto four = static_cast<uint32_t>(x | x >> 16);
    memcpy(to + 4 * half, &four, sizeof four);
  }
}

// table[i % entries] of each lane, for 32 to 256 entries. (AVX-512's permutations take 2 to 20 cycles here,
// its gathers 60.)
template <int entries>
LM_INLINE F32 look_up(const float* table, U32 i) {
  F32 r;
#if defined(__AVX512F__)
  const __m512i at = (__m512i)i.part[0];
  __m512 found[entries / 32];
  for (int g = 0; g < entries / 32; ++g)
    found[g] =
        _mm512_permutex2var_ps(_mm512_loadu_ps(table + 32 * g), at, _mm512_loadu_ps(table + 32 * g + 16));
  for (int groups = entries / 32, bit = 32; groups > 1; groups /= 2, bit *= 2) {
    const __mmask16 upper = _mm512_mask_test_epi32_mask(0xFFFF, at, _mm512_set1_epi32(bit));
    for (int g = 0; g < groups / 2; ++g)
      found[g] = _mm512_mask_blend_ps(upper, found[2 * g], found[2 * g + 1]);
  }
  r.part[0] = (NativeF32)found[0];
#else
  i = i & U32(entries - 1);
  for (int p = 0; p < kParts; ++p) {
#if defined(__AVX2__)
    r.part[p] = (NativeF32)_mm256_i32gather_ps(table, (__m256i)i.part[p], 4);
#else
    for (int l = 0; l < kNative; ++l) r.part[p][l] = table[i.part[p][l]];
#endif
  }
#endif
  return r;
}
LM_INLINE U32 load_u16(const uint16_t* from, Part count) {
  uint16_t whole[kLanes] = {};
  memcpy(whole, from, sizeof(uint16_t) * static_cast<size_t>(count.n));
  return load_u16(whole, Whole{});
}
LM_INLINE void store_u16(uint16_t* to, U32 a, Part count) {
  uint16_t whole[kLanes];
  store_u16(whole, a, Whole{});
  memcpy(to, whole, sizeof(uint16_t) * static_cast<size_t>(count.n));
}

LM_INLINE F32 load(const float* from, Whole) {
  F32 r;
  for (int p = 0; p < kParts; ++p) r.part[p] = *reinterpret_cast<const MemoryF32*>(from + p * kNative);
  return r;
}
LM_INLINE void store(float* to, F32 a, Whole) {
  for (int p = 0; p < kParts; ++p) *reinterpret_cast<MemoryF32*>(to + p * kNative) = a.part[p];
}
LM_INLINE F32 load(const float* from, Part count) {
  float whole[kLanes] = {};
  memcpy(whole, from, sizeof(float) * static_cast<size_t>(count.n));
  return load(whole, Whole{});
}
LM_INLINE void store(float* to, F32 a, Part count) {
  float whole[kLanes];
  store(whole, a, Whole{});
  memcpy(to, whole, sizeof(float) * static_cast<size_t>(count.n));
}

// After the parameters of a lambda given to each_vector: left to itself gcc 12 calls the large ones, and
// their constants and sums then go through memory each time.
#define LM_BODY __attribute__((always_inline))

// Calls body(first, Whole) for whole vectors and body(first, Part) for the rest of n elements.
template <class Body>
LM_INLINE void each_vector(int64_t n, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, Whole{});
  if (i < n) body(i, Part{static_cast<int>(n - i)});
}

// `a`, with `rest` in the lanes outside of the Part.
LM_INLINE F32 tail_or(F32 a, Part count, float rest) {
  float lane[kLanes];
  store(lane, a, Whole{});
  for (int l = count.n; l < kLanes; ++l) lane[l] = rest;
  return load(lane, Whole{});
}
LM_INLINE F32 tail_or(F32 a, Whole, float) {
  return a;
}

// Lanes added by the tree (l, l + 8), (l, l + 4), (l, l + 2), (0, 1).
LM_INLINE float sum_lanes(F32 a) {
  float lane[kLanes];
  store(lane, a, Whole{});
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int l = 0; l < step; ++l) lane[l] += lane[l + step];
  }
  return lane[0];
}
LM_INLINE float max_lanes(F32 a) {
  float lane[kLanes];
  store(lane, a, Whole{});
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int l = 0; l < step; ++l) lane[l] = lane[l] < lane[l + step] ? lane[l + step] : lane[l];
  }
  return lane[0];
}

}  // namespace lm::LM_ISA
