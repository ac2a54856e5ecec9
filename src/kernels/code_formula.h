// Quantization of state (optim/rules/codes.h) as formulas over F, float or lanes of it. Both launchers and
// the tests' scalar reference use these lines.
#pragma once

#include "base/host_device.h"
#include "optim/rules/codes.h"

namespace lm {

// The scalar forms of functions in lanes.h.
LM_HOST_DEVICE float greatest(float a, float b) {
  return b < a ? a : b;
}
LM_HOST_DEVICE float least(float a, float b) {
  return a < b ? a : b;
}
LM_HOST_DEVICE float of_octave(const float* table, uint32_t octave) {
  return table[octave & 31];
}
LM_HOST_DEVICE float of_piece(const float* table, uint32_t piece) {
  return table[piece & 15];
}
// n, or n + 1 if `a` is not below b.
LM_HOST_DEVICE uint32_t next_from(uint32_t n, float a, float b) {
  return n + (a < b ? 0 : 1);
}

template <class F>
LM_HOST_DEVICE F magnitude(F x) {
  using U = decltype(bits_of(x));
  return float_of(bits_of(x) & U(0x7FFFFFFF));
}

// A state before it is quantized: 0 in place of NaN and infinity.
template <class F>
LM_HOST_DEVICE F coded_state(F x) {
  return select_less(magnitude(x), F(__builtin_inff()), x, F(0.f));
}

// The stored scale for a block's largest magnitude, and numbers divided by it. bitsandbytes multiplies by the
// reciprocal, torchao divides.
template <CodeMap map>
LM_HOST_DEVICE float code_scale(float largest) {
  if constexpr (kIsDynamic8<map>) return select_less(largest, 1.17549435e-38f, 0.f, largest);
  const float scale = select_less(largest, 1e-12f, 1e-12f, largest);
  return map == CodeMap::kFloat8 ? scale / kLargestFloat8 : scale;
}
// The factor or divisor of numbers.
template <CodeMap map>
LM_HOST_DEVICE float code_factor(float largest) {
  if constexpr (kIsDynamic8<map>) return select_less(largest, 1.17549435e-38f, 0.f, 1.f / largest);
  return code_scale<map>(largest);
}
template <CodeMap map, class F>
LM_HOST_DEVICE F over_scale(F x, F factor) {
  if constexpr (kIsDynamic8<map>) return x * factor;
  return x / factor;
}

// The unrounded index of a dynamic map's magnitude. Never below 0.
template <class Table, class F>
LM_HOST_DEVICE F code_number(const Table& table, F magnitude) {
  const F size = greatest(magnitude, F(kLeastCoded));
  const auto octave = bits_of(size) >> 23;
  const auto piece = next_from(bits_of(of_octave(table.piece, octave)), size, of_octave(table.next, octave));
  return least(fused(size, of_piece(table.slope, piece), of_piece(table.offset, piece)),
               of_piece(table.last, piece));
}

// The code whose value is nearest to x, a number in [-1, 1] up to rounding. (Within 2e-5 of a step of the
// middle between two values it may be either.)
template <CodeMap map, class Table, class F>
LM_HOST_DEVICE auto nearest_code(const Table& table, F x) {
  using U = decltype(bits_of(x));
  const F number = code_number(table, map == CodeMap::kUnsigned8 ? x : magnitude(x));
  // Floats from 2^23 on are integers: adding it rounds.
  const U rounded = bits_of(number + F(8388608.f)) & U(0x1FF);
  if constexpr (map == CodeMap::kUnsigned8) return rounded;
  // 1 has no negative: the code of the largest magnitude below it stands for it.
  const U negative = U(0) - (bits_of(x) >> 31);
  return U(127) + rounded - (negative & (rounded + rounded - (rounded >> 7)));
}

template <CodeMap map, class F>
LM_HOST_DEVICE auto nearest_code(const CodeTable4& table, F x) {
  using U = decltype(bits_of(x));
  F number(0.f);
  LM_UNROLL
  for (int t = 0; t < 15; ++t) number = number + select_less(x, F(table.threshold[t]), F(0.f), F(1.f));
  return bits_of(number + F(8388608.f)) & U(0xF);
}

// Nearest even. Adding 2^14 rounds subnormals: its last place is their step.
template <CodeMap map, class F>
LM_HOST_DEVICE auto nearest_code(const FloatTable8&, F x) {
  using U = decltype(bits_of(x));
  const F size = magnitude(x);
  const U bits = bits_of(size);
  const U normal = ((bits + U(0x7FFFF) + ((bits >> 20) & U(1))) >> 20) - U(120 << 3);
  const U small = bits_of(size + F(16384.f)) & U(0xF);
  const U code = bits_of(select_less(size, F(0.015625f), float_of(small), float_of(normal)));
  return code | ((bits_of(x) >> 31) << 7);
}

}  // namespace lm
