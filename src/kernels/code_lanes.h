// The functions that code_formula.h needs, for lanes.
//
// Values only, as in lanes.h.
#pragma once

#include "kernels/half_lanes.h"

namespace lm::LM_ISA {

LM_INLINE F32 greatest(F32 a, F32 b) {
  return max(a, b);
}
LM_INLINE F32 least(F32 a, F32 b) {
  return min(a, b);
}
// Entry i % 32 of a table, and entry i below 16.
LM_INLINE F32 of_octave(const float* table, U32 octave) {
  return look_up<32>(table, octave);
}
LM_INLINE F32 of_piece(const float* table, U32 piece) {
  return look_up(load(table, Whole{}), piece);
}
// n, or n + 1 if `a` is not below b.
LM_INLINE U32 next_from(U32 n, F32 a, F32 b) {
#if defined(__AVX512F__)
  const __mmask16 from = _mm512_cmp_ps_mask((__m512)a.part[0], (__m512)b.part[0], _CMP_NLT_UQ);
  n.part[0] =
      (NativeU32)_mm512_mask_add_epi32((__m512i)n.part[0], from, (__m512i)n.part[0], _mm512_set1_epi32(1));
#else
  for (int p = 0; p < kParts; ++p) n.part[p] += 1 + (NativeU32)(a.part[p] < b.part[p]);
#endif
  return n;
}

}  // namespace lm::LM_ISA
