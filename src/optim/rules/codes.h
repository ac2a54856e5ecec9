// Quantized state: elements of a block share an fp32 scale, and each is stored as the index of the nearest
// value in a map, times that scale. Tensors below 4096 elements keep fp32 state. Pure constants.
//
// 8 bits, as bitsandbytes: blocks of 256, the scale is the largest magnitude; the maps are its
// create_dynamic_map(signed, 7, 8): seven decades, each with twice as many values as the one below it, 0 and
// 1. 4 bits, as torchao: blocks of 128, create_dynamic_map(True, 3, 4) of the same kind, and 1/16, 2/16,
// ... 1. Floats of 8 bits (e4m3), as torchao: blocks of 256, the largest magnitude becomes the largest float.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "optim/rules/rule.h"

namespace lm {

inline constexpr int64_t kCodeBlock = 256;  // quantized ranges are multiples of this

enum class CodeMap : uint8_t { kSigned8, kUnsigned8, kSigned4, kUnsigned4, kFloat8 };

constexpr int code_bits(CodeMap map) {
  return map == CodeMap::kSigned4 || map == CodeMap::kUnsigned4 ? 4 : 8;
}
// bitsandbytes'. (A constant, usable in device code.)
template <CodeMap map>
inline constexpr bool kIsDynamic8 = map == CodeMap::kSigned8 || map == CodeMap::kUnsigned8;
// Elements that share a scale.
constexpr int64_t code_block(CodeMap map) {
  return code_bits(map) == 4 ? 128 : kCodeBlock;
}

// A dynamic map's magnitudes in order: 0, those of the decades, 1.
template <int n>
struct Magnitudes {
  float at[n] = {};
};
template <CodeMap map>
constexpr auto list_magnitudes() {
  constexpr bool with_sign = map != CodeMap::kUnsigned8;
  constexpr float kDecades[] = {1e-6F, 1e-5F, 1e-4F, 1e-3F, 1e-2F, 1e-1F, 1.F};
  constexpr int first = map == CodeMap::kSigned4 ? 4 : 0;  // of the decades
  Magnitudes<map == CodeMap::kSigned4 ? 9 : with_sign ? 129 : 256> out;
  int count = 1;
  for (int i = 0; i < 7 - first; ++i) {
    const int n = 1 << (with_sign ? i : i + 1);
    // torch.linspace(0.1, 1, n + 1) in fp32: from the nearer end, each product and sum rounded once.
    const float step = (1.F - 0.1F) / static_cast<float>(n);
    const auto bound = [&](int k) {
      const double from = 0.1F, each = step;
      return static_cast<float>(k < (n + 1) / 2 ? from + each * k : 1 - each * (n - k));
    };
    for (int k = 0; k < n; ++k) out.at[count++] = kDecades[first + i] * ((bound(k) + bound(k + 1)) / 2.F);
  }
  out.at[count] = 1.F;
  return out;
}

// The value of each code of a dynamic map, and the inverse. The indices of magnitudes, 0, 1, 2, ..., are
// split into pieces: that of 0, one line for each decade, that of 1. A piece begins in the middle between the
// last magnitude of the one before and its own first one, where its line rounds to its first index; at its
// end the line would exceed its last index, which therefore bounds it. An octave (numbers with one exponent)
// has parts of two pieces at most. Indices into the arrays of octaves are the exponent % 32.
struct CodeTable {
  float value[256] = {};
  float piece[32] = {};  // of an octave's smallest numbers, as the bits of its index
  float next[32] = {};   // from here on the next piece applies
  // Per piece: index = min(slope * x + offset, last).
  float slope[16] = {};
  float offset[16] = {};
  float last[16] = {};
};
inline constexpr uint32_t kFirstOctave = 104;  // 2^-23
inline constexpr float kLeastCoded =
    std::bit_cast<float>(kFirstOctave << 23);  // a smaller one is nearest to 0

template <CodeMap map>
constexpr CodeTable make_code_table() {
  constexpr int kDecades = 7;
  const auto magnitudes = list_magnitudes<map>();
  const int one = static_cast<int>(std::size(magnitudes.at)) - 1;
  CodeTable out;
  for (int code = 0; code < 256; ++code) {
    const int m = map == CodeMap::kSigned8 ? code - 127 : code;
    out.value[code] = m < 0 ? -magnitudes.at[-m] : magnitudes.at[m];
  }
  float begin[kDecades + 4] = {};  // of a piece, and above all of them
  double decade = 1e-6;
  for (int d = 0, first = 1; d < kDecades; ++d, decade *= 10) {
    // The slope of the unrounded values: the distance of two rounded neighbours is off by up to 2e-5, which
    // after 128 of them is one code in a thousand.
    const int n = 1 << (map == CodeMap::kUnsigned8 ? d + 1 : d);
    const double slope = n / (0.9 * decade);
    begin[d + 1] = (magnitudes.at[first - 1] + magnitudes.at[first]) / 2;
    out.slope[d + 1] = static_cast<float>(slope);
    out.offset[d + 1] = static_cast<float>(first - 0.5 - 0.1 * decade * slope);
    first += n;
    out.last[d + 1] = static_cast<float>(first - 1);
  }
  begin[kDecades + 1] = (magnitudes.at[one - 1] + magnitudes.at[one]) / 2;
  begin[kDecades + 2] = begin[kDecades + 3] = 2;
  out.offset[kDecades + 1] = out.last[kDecades + 1] = static_cast<float>(one);
  for (uint32_t octave = kFirstOctave, piece = 0; octave < 128; ++octave) {
    const float low = std::bit_cast<float>(octave << 23);
    while (begin[piece + 1] <= low) ++piece;
    if (begin[piece + 2] < 2 * low) throw "more pieces than an octave has room for";
    out.piece[octave % 32] = std::bit_cast<float>(piece);
    out.next[octave % 32] = begin[piece + 1];
  }
  return out;
}

// The value of each 4-bit code, and the inverse: a number's code is the count of thresholds it reaches. As in
// torchao, a number reaches a code once its distance from the previous value, in fp32, is half of the step.
struct CodeTable4 {
  float value[16] = {};
  float threshold[15] = {};
};
template <CodeMap map>
constexpr CodeTable4 make_code_table4() {
  CodeTable4 out;
  if constexpr (map == CodeMap::kSigned4) {
    const auto magnitudes = list_magnitudes<map>();
    for (int code = 0; code < 16; ++code)
      out.value[code] = code < 7 ? -magnitudes.at[7 - code] : magnitudes.at[code - 7];
  } else {
    for (int code = 0; code < 16; ++code) out.value[code] = static_cast<float>(code + 1) / 16;
  }
  for (int code = 0; code < 15; ++code) {
    const float low = out.value[code], half = (out.value[code + 1] - low) * 0.5F;
    // Bisects over numbers ordered as integers: the first that is far enough.
    const auto at = [](int64_t number) {
      return number < 0 ? -std::bit_cast<float>(static_cast<uint32_t>(-number))
                        : std::bit_cast<float>(static_cast<uint32_t>(number));
    };
    const auto number = [](float x) {
      return x < 0 ? -static_cast<int64_t>(std::bit_cast<uint32_t>(-x))
                   : static_cast<int64_t>(std::bit_cast<uint32_t>(x));
    };
    int64_t below = number(low), reaches = number(out.value[code + 1]);
    while (reaches - below > 1) {
      const int64_t middle = below + (reaches - below) / 2;
      (at(middle) - low >= half ? reaches : below) = middle;
    }
    out.threshold[code] = at(reaches);
  }
  return out;
}

// The value of each 8-bit float, e4m3: four bits of exponent, three of the mantissa, no infinity.
struct FloatTable8 {
  float value[256] = {};
};
constexpr float kLargestFloat8 = 448;
constexpr FloatTable8 make_float_table8() {
  FloatTable8 out;
  for (uint32_t code = 0; code < 256; ++code) {
    const uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    const float size = exponent == 0 ? static_cast<float>(mantissa) / 512
                                     : std::bit_cast<float>((exponent + 120) << 23 | mantissa << 20);
    out.value[code] = (code & 127) == 127 ? 0 : code < 128 ? size : -size;  // NaN is never produced
  }
  return out;
}

// A map's table.
template <CodeMap map>
constexpr auto make_table() {
  if constexpr (map == CodeMap::kFloat8) {
    return make_float_table8();
  } else if constexpr (code_bits(map) == 4) {
    return make_code_table4<map>();
  } else {
    return make_code_table<map>();
  }
}

// The state tensors of a rule with quantized state: each becomes its codes, their scales, and the fp32 values
// of small tensors.
template <size_t n>
constexpr std::array<StateTensor, 3 * n> coded_state_tensors(const std::array<StateTensor, n>& plain,
                                                             const std::array<CodeMap, n>& maps) {
  std::array<StateTensor, 3 * n> out;
  for (size_t s = 0; s < n; ++s) {
    StateTensor* const of = &out[3 * s];
    of[0] = of[1] = of[2] = plain[s];
    of[0].type = DType::kU8;
    of[0].of = StateTensorOf::kLarge;
    of[1].of = StateTensorOf::kLarge;
    of[0].per = 8 / code_bits(maps[s]);
    of[1].per = code_block(maps[s]);
    of[1].append("_scale");
    of[2].of = StateTensorOf::kSmall;
    of[2].append("_small");
  }
  return out;
}

}  // namespace lm
