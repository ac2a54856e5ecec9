// 8-bit codes (optim/rules/codes.h), 64 at once in the order of turned_lanes.h: decoding, and, for the
// dynamic maps with AVX2 and AVX-512, encoding. All have the bits of code_formula.h.
//
// Values only, as in lanes.h.
#pragma once

#include <bit>

#include "kernels/code_formula.h"
#include "kernels/code_lanes.h"
#include "kernels/turned_lanes.h"
#include "kernels/update_range.h"

namespace lm::LM_ISA {
namespace {

template <CodeMap map>
inline constexpr auto kTable = make_table<map>();

// The maps encoded by joinable_numbers() and join_numbers(). The others use the formula directly.
template <CodeMap map>
inline constexpr bool kJoinsCodes = kNative >= 8 && kIsDynamic8<map>;

#if defined(__AVX512F__)
// Permutes bytes from memory's order to the one in which they unpack into four turned vectors, and back.
LM_INLINE __m512i turned_bytes(const uint8_t* from) {
  return _mm512_maskz_permutexvar_epi64(0xFF, _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7),
                                        _mm512_loadu_si512(from));
}
LM_INLINE void store_turned_bytes(uint8_t* to, __m512i a) {
  _mm512_storeu_si512(to, _mm512_maskz_permutexvar_epi64(0xFF, _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), a));
}

// The bytes of values, byte by byte.
struct ByteTable {
  alignas(64) uint8_t byte[4][256] = {};
};
constexpr ByteTable make_byte_table(const float* values, size_t n) {
  ByteTable out;
  for (size_t i = 0; i < n; ++i) {
    const auto bits = std::bit_cast<uint32_t>(values[i]);
    for (int b = 0; b < 4; ++b) out.byte[b][i] = static_cast<uint8_t>(bits >> (8 * b));
  }
  return out;
}

// Looks up one byte of the entries `at` % 128 from `entry` on.
LM_INLINE __m512i look_up_bytes(const uint8_t* entry, __m512i at) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(entry), at, _mm512_load_si512(entry + 64));
}
// The values of 64 codes, byte by byte.
template <CodeMap map>
LM_INLINE void look_up_values(__m512i codes, __m512i (&byte)[4]) {
  if constexpr (map == CodeMap::kSigned8) {
    // Magnitudes and signs separately: half of the permutations. Magnitude 128, that of 1, is entry 0.
    static constexpr ByteTable kSizes = make_byte_table(kTable<map>.value + 127, 128);
    const __m512i number = _mm512_sub_epi8(codes, _mm512_set1_epi8(127));
    const __m512i size = _mm512_maskz_abs_epi8(~__mmask64{0}, number);
    const __mmask64 negative = _mm512_movepi8_mask(number), one = _mm512_movepi8_mask(size);
    each_of<4>([&](auto b) LM_BODY { byte[b] = look_up_bytes(kSizes.byte[b], size); });
    byte[3] = _mm512_mask_add_epi8(byte[3], negative, byte[3], _mm512_set1_epi8(-128));
    byte[3] = _mm512_mask_mov_epi8(byte[3], one, _mm512_set1_epi8(0x3F));
    byte[2] = _mm512_mask_mov_epi8(byte[2], one, _mm512_set1_epi8(-128));
  } else {
    static constexpr ByteTable kBytes = make_byte_table(kTable<map>.value, 256);
    each_of<4>([&](auto b) LM_BODY {
      byte[b] = _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes), look_up_bytes(kBytes.byte[b], codes),
                                       look_up_bytes(kBytes.byte[b] + 128, codes));
    });
  }
}

template <CodeMap map>
LM_INLINE Wide values_of_64(const uint8_t* codes) {
  __m512i byte[4];
  look_up_values<map>(turned_bytes(codes), byte);
  return parted({_mm512_unpacklo_epi8(byte[0], byte[1]), _mm512_unpackhi_epi8(byte[0], byte[1])},
                {_mm512_unpacklo_epi8(byte[2], byte[3]), _mm512_unpackhi_epi8(byte[2], byte[3])});
}

// The input of join_numbers(): the rounded indices of magnitudes, with the sign of x if the map has one.
template <CodeMap map>
LM_INLINE U32 joinable_numbers(F32 x) {
  F32 of = code_number(kTable<map>, map == CodeMap::kUnsigned8 ? x : magnitude(x));
  if constexpr (map == CodeMap::kSigned8) of = float_of(bits_of(of) | (bits_of(x) & U32(0x80000000)));
  U32 r;
  r.part[0] = (NativeU32)_mm512_maskz_cvtps_epi32(0xFFFF, (__m512)of.part[0]);
  return r;
}

// Packing 32-bit numbers to bytes saturates them: from -128 to 127 for codes from 0 to 255, as 1 has no
// negative.
template <CodeMap map>
LM_INLINE void join_numbers(uint8_t* codes, const WideU32& numbers) {
  const auto number = [&](int v) LM_BODY { return (__m512i)numbers.of[v].part[0]; };
  __m512i bytes;
  if constexpr (map == CodeMap::kSigned8) {
    const __m512i one = _mm512_set1_epi16(1);
    bytes = _mm512_packs_epi16(_mm512_sub_epi16(_mm512_packs_epi32(number(0), number(1)), one),
                               _mm512_sub_epi16(_mm512_packs_epi32(number(2), number(3)), one));
    bytes = _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
  } else {
    bytes = _mm512_packus_epi16(_mm512_packus_epi32(number(0), number(1)),
                                _mm512_packus_epi32(number(2), number(3)));
  }
  store_turned_bytes(codes, bytes);
}

#elif defined(__AVX2__)
// Single loads, of which a Zen 3 completes two per cycle: its gather of eight takes ten.
template <CodeMap map>
LM_INLINE Wide values_of_64(const uint8_t* codes) {
  const float* const value = kTable<map>.value;
  return wide_of([&](int v) LM_BODY {
    F32 r;
    LM_UNROLL
    for (int p = 0; p < kParts; ++p) {
      const uint8_t* const c = codes + v * kLanes + p * kNative;
      r.part[p] = (NativeF32)_mm256_setr_ps(value[c[0]], value[c[1]], value[c[2]], value[c[3]], value[c[4]],
                                            value[c[5]], value[c[6]], value[c[7]]);
    }
    return r;
  });
}

// The pieces of CodeTable without that of 0: eight, as many as a register has lanes. Lane g has piece 1 + g.
// guess(size) % 8 is the lane of the size's piece or the lane before it.
template <CodeMap map>
struct PieceLanes {
  // A float's bits, exponent and mantissa, are nearly a logarithm: times a constant they grow by about 1 per
  // decade. With these constants guess() is never off by more than 1, and the first piece has lane 0; the
  // constructor checks both.
  static constexpr uint32_t kFactor = map == CodeMap::kSigned8 ? 156 : 157;
  static constexpr uint32_t guess(float size) {
    return ((std::bit_cast<uint32_t>(size) >> 16) * kFactor) >> 16;
  }
  static constexpr uint32_t kPieces = 8;
  alignas(32) float next[kPieces], slope[kPieces], offset[kPieces], last[kPieces];
  float first;  // begin of the first piece

  constexpr PieceLanes() : next{}, slope{}, offset{}, last{}, first(0) {
    constexpr CodeTable table = make_table<map>();
    for (uint32_t octave = kFirstOctave; octave < 128; ++octave) {
      const auto piece = std::bit_cast<uint32_t>(table.piece[octave % 32]);
      (piece == 0 ? first : next[piece - 1]) = table.next[octave % 32];
    }
    next[kPieces - 1] = 2;
    if (guess(first) % kPieces != 0) throw "the first piece's lane is not the first";
    for (uint32_t g = 0; g < kPieces; ++g) {
      slope[g] = table.slope[g + 1], offset[g] = table.offset[g + 1], last[g] = table.last[g + 1];
      const float least = g == 0 ? first : next[g - 1];
      const float greatest =
          g + 1 == kPieces ? 1 : std::bit_cast<float>(std::bit_cast<uint32_t>(next[g]) - 1);
      if (guess(least) - guess(first) + 1 < g || guess(greatest) - guess(first) > g)
        throw "a guess is neither the piece nor the one before";
    }
  }
};

// The input of join_numbers(): the rounded indices of magnitudes, with the sign of x if the map has one.
template <CodeMap map>
LM_INLINE U32 joinable_numbers(F32 x) {
  static constexpr PieceLanes<map> kLanesOf;
  U32 r;
  LM_UNROLL
  for (int p = 0; p < kParts; ++p) {
    const __m256 sign = _mm256_set1_ps(-0.F), each = (__m256)x.part[p];
    const __m256 size = map == CodeMap::kSigned8 ? _mm256_andnot_ps(sign, each) : each;
    __m256i at =
        _mm256_srli_epi32(_mm256_mulhi_epu16((__m256i)size, _mm256_set1_epi16(PieceLanes<map>::kFactor)), 16);
    const auto of_piece = [&](const float* table)
                              LM_BODY { return _mm256_permutevar8x32_ps(_mm256_load_ps(table), at); };
    at = _mm256_sub_epi32(at, (__m256i)_mm256_cmp_ps(size, of_piece(kLanesOf.next), _CMP_GE_OQ));
    __m256 number = _mm256_min_ps(_mm256_fmadd_ps(size, of_piece(kLanesOf.slope), of_piece(kLanesOf.offset)),
                                  of_piece(kLanesOf.last));
    number = _mm256_and_ps(number, _mm256_cmp_ps(size, _mm256_set1_ps(kLanesOf.first), _CMP_GE_OQ));
    if constexpr (map == CodeMap::kSigned8) number = _mm256_or_ps(number, _mm256_and_ps(each, sign));
    r.part[p] = (NativeU32)_mm256_cvtps_epi32(number);
  }
  return r;
}

// Packing 32-bit numbers to bytes saturates them: from -128 to 127 for codes from 0 to 255, as 1 has no
// negative.
template <CodeMap map>
LM_INLINE void join_numbers(uint8_t* codes, const WideU32& numbers) {
  LM_UNROLL
  for (int half = 0; half < 2; ++half) {
    const auto pair = [&](int v) LM_BODY {
      const auto low = (__m256i)numbers.of[v].part[0], high = (__m256i)numbers.of[v].part[1];
      if constexpr (map == CodeMap::kUnsigned8) return _mm256_packus_epi32(low, high);
      return _mm256_sub_epi16(_mm256_packs_epi32(low, high), _mm256_set1_epi16(1));
    };
    __m256i bytes;
    if constexpr (map == CodeMap::kUnsigned8) {
      bytes = _mm256_packus_epi16(pair(2 * half), pair(2 * half + 1));
    } else {
      bytes =
          _mm256_xor_si256(_mm256_packs_epi16(pair(2 * half), pair(2 * half + 1)), _mm256_set1_epi8(-128));
    }
    // The packs work within 128 bits each.
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes + 32 * half), bytes);
  }
}

#else
template <CodeMap map>
LM_INLINE Wide values_of_64(const uint8_t* codes) {
  return wide_of([&](int v) LM_BODY { return look_up<256>(kTable<map>.value, load_u8(codes + v * kLanes)); });
}
#endif

}  // namespace
}  // namespace lm::LM_ISA
