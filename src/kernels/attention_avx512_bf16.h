// Attention's arithmetic with products of pairs of bf16 values added in fp32: twice the rate of fp32 and half
// the bytes. Operands are packed so that a lane holds two neighbours along the summed index; P and dS are
// rounded to bf16. For the files of one instruction set only.
#pragma once

#include <immintrin.h>

#include "kernels/attention_portable.h"

namespace lm::attention {
namespace {

// Turns 16 rows of 16 lanes into columns.
[[gnu::always_inline]] inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  // Now x[4 g + c] holds column 4 q + c of rows 4 g .. 4 g + 3 in its quarter q.
#pragma GCC unroll 16
  for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_shuffle_i32x4(x[c], x[4 + c], 0x88),
                  b = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(x[c], x[4 + c], 0xDD),
                  e = _mm512_shuffle_i32x4(x[8 + c], x[12 + c], 0xDD);
    y[c] = _mm512_shuffle_i32x4(a, b, 0x88);
    y[8 + c] = _mm512_shuffle_i32x4(a, b, 0xDD);
    y[4 + c] = _mm512_shuffle_i32x4(d, e, 0x88);
    y[12 + c] = _mm512_shuffle_i32x4(d, e, 0xDD);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}

// The first `count` of 32 bf16 values, zeros behind.
[[gnu::always_inline]] inline __m512i load_bf16(const void* from, int64_t count) {
  if (count >= 32) return _mm512_loadu_si512(from);
  return _mm512_maskz_loadu_epi16((1u << larger(count, 0)) - 1, from);
}

struct Avx512Bf16 : Portable<16, BFloat16> {
  using Lane = uint32_t;
  static constexpr int kStep = 2;
  using L = __m512i;

  [[gnu::always_inline]] static L load_lanes(const Lane* from) { return _mm512_loadu_si512(from); }
  [[gnu::always_inline]] static L splat(const Lane* x) { return _mm512_set1_epi32(static_cast<int>(*x)); }
  [[gnu::always_inline]] static V multiply_add(L a, L b, V sum) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  [[gnu::always_inline]] static V larger(V a, V b) { return _mm512_max_ps(a, b); }
  [[gnu::always_inline]] static V keep(V x, int64_t k, int64_t begin, int64_t end, float other) {
    const __m512i lane =
        _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                         _mm512_set1_epi32(static_cast<int>(k)));
    __mmask16 mask = _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(static_cast<int>(end)));
    mask = _mm512_mask_cmpge_epi32_mask(mask, lane, _mm512_set1_epi32(static_cast<int>(begin)));
    return _mm512_mask_mov_ps(_mm512_set1_ps(other), mask, x);
  }
  [[gnu::always_inline]] static bool any_above(V x, float limit) {
    return _mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
  }
  [[gnu::always_inline]] static float largest(V x) { return _mm512_reduce_max_ps(x); }
  [[gnu::always_inline]] static float total(V x) { return _mm512_reduce_add_ps(x); }

  // 2^x, exactly 1 at 0.
  [[gnu::always_inline]] static V exp2(V x) {
    const V n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    return _mm512_scalef_ps(exp2_fraction(x - n), n);
  }

  [[gnu::always_inline]] static void store_keys(Lane* to, V x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  }
  [[gnu::always_inline]] static void store_row_pair(Lane* to, int64_t, V x0, V x1) {
    const __m512i halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(x1, x0));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(interleave_halves(), halves));
  }

  static float inner_product(const BFloat16* a, const BFloat16* b, int64_t count) {
    V sum = zero();
    for (int64_t i = 0; i < count; i += 32) {
      sum = multiply_add(load_bf16(a + i, count - i), load_bf16(b + i, count - i), sum);
    }
    return total(sum);
  }
  static void store_row(BFloat16* to, const float* from, float factor, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) {
      const __mmask16 mask = count - i >= 16 ? 0xFFFF : (1u << (count - i)) - 1;
      const __m256bh rounded =
          _mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_loadu_ps(from + i), _mm512_set1_ps(factor)));
      _mm256_mask_storeu_epi16(to + i, mask, reinterpret_cast<__m256i>(rounded));
    }
  }

  static void pack_left(Lane* to, const void* const* row, int64_t rows, int64_t all, int64_t dim) {
    for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * dim / 2, row[r], dim * 2);
    std::memset(to + rows * dim / 2, 0, (all - rows) * dim * 2);
  }
  static void pack_rows(Lane* to, const void* const* row, int64_t rows, int64_t all, int64_t dim,
                        int64_t width) {
    for (int64_t r = 0; r < all; r += 2) {
      pack_pair(to + r / 2 * width, r < rows ? row[r] : nullptr, r + 1 < rows ? row[r + 1] : nullptr, dim,
                width);
    }
  }
  static void pack_keys(Lane* to, const BFloat16* from, int64_t stride, int64_t keys, int64_t dim,
                        int64_t width) {
    for (int64_t j = 0; j < kKeys; j += 2) {
      pack_pair(to + j / 2 * width, j < keys ? from + j * stride : nullptr,
                j + 1 < keys ? from + (j + 1) * stride : nullptr, dim, width);
    }
  }
  static void pack_transposed(Lane* to, const BFloat16* from, int64_t stride, int64_t keys, int64_t dim) {
    for (int64_t j = 0; j < kKeys; j += 16) {
      for (int64_t d = 0; d < dim; d += 32) {
        __m512i x[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          x[i] = j + i < keys ? load_bf16(from + (j + i) * stride + d, dim - d) : _mm512_setzero_si512();
        }
        transpose(x);
        Lane* lanes = to + d / 2 * kKeys + j;
        const int64_t used = (dim - d) / 2;
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
          if (i < used) _mm512_storeu_si512(lanes + i * kKeys, x[i]);
        }
      }
    }
  }

 private:
  [[gnu::always_inline]] static __m512i interleave_halves() {
    const __m512i word = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_or_si512(word, _mm512_slli_epi32(_mm512_add_epi32(word, _mm512_set1_epi32(16)), 16));
  }
  // Two rows (null: zeros), element by element side by side; zeros from `dim` to `width`.
  [[gnu::always_inline]] static void pack_pair(Lane* to, const void* row0, const void* row1, int64_t dim,
                                               int64_t width) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    // 16-bit index of element i of row 0 in the low half, of row 1 (32 + i) in the high half.
    const __m512i pick =
        _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(32)), 16));
    const __m512i next = _mm512_add_epi32(pick, _mm512_set1_epi32(0x00100010));
    for (int64_t d = 0; d < width; d += 32) {
      const __m512i a =
          row0 != nullptr ? load_bf16(static_cast<const BFloat16*>(row0) + d, dim - d) : __m512i{};
      const __m512i b =
          row1 != nullptr ? load_bf16(static_cast<const BFloat16*>(row1) + d, dim - d) : __m512i{};
      _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, pick, b));
      if (d + 16 < width) _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(a, next, b));
    }
  }
};

}  // namespace
}  // namespace lm::attention
