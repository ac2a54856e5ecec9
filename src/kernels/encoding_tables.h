// The tables of the quantization formats (base/encoding_kind.h), from bitsandbytes 0.50.2. Constants.
#pragma once

#include <cstdint>

#include "base/encoding_kind.h"
#include "base/host_device.h"
#include "kernels/kernels.h"
#include "optim/rules/codes.h"

namespace lm {

// Maps each block of the output, in order, to its block in a matrix of 4-bit codes: a value.
struct ScaleBlocks {
  explicit ScaleBlocks(const Materialise& m) : first(m.first / kScaleBlock) {
    if (m.out.columns == m.width()) return;
    row = m.out.columns / kScaleBlock, matrix_row = m.width() / kScaleBlock;
  }
  // Whether the output consists of whole blocks.
  static bool can(const Materialise& m) {
    const bool whole_rows = m.out.columns == m.width();
    return m.first % kScaleBlock == 0 &&
           (whole_rows || (m.out.columns % kScaleBlock == 0 && m.width() % kScaleBlock == 0));
  }

  int64_t first;
  int64_t row = 1, matrix_row = 1;  // blocks per row; 1 and 1: whole rows, contiguous
};
LM_HOST_DEVICE int64_t block_of_matrix(const ScaleBlocks& b, int64_t block) {
  if (b.row == b.matrix_row)
    return b.first + block;  // avoids a division, which costs a GPU more than the rest
  return b.first + block / b.row * b.matrix_row + block % b.row;
}

// Values of 4-bit codes; a value in between becomes the code in `order` at the index given by the number of
// thresholds below it. Thresholds are the midpoints in fp32.
struct FourBitTable {
  float value[16];
  float threshold[15];
  uint8_t order[16];
};

inline constexpr FourBitTable kNf4Table = {
    {-1.f, -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f, -0.091050036f, 0.f, 0.0795803f,
     0.1609302f, 0.2461123f, 0.33791524f, 0.44070983f, 0.562617f, 0.72295684f, 1.f},
    {-0.8480964f, -0.6106329f, -0.45999527f, -0.33967942f, -0.2346074f, -0.13791174f, -0.045525018f,
     0.03979015f, 0.12025525f, 0.20352125f, 0.29201376f, 0.38931254f, 0.50166345f, 0.6427869f, 0.86147845f},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};

// Signed floats of two exponent bits and one of the mantissa, divided by the largest. Codes 0 and 8 are 0.
inline constexpr FourBitTable kFp4Table = {
    {0.f, 0.0052083335f, 0.6666667f, 1.f, 0.33333334f, 0.5f, 0.16666667f, 0.25f, 0.f, -0.0052083335f,
     -0.6666667f, -1.f, -0.33333334f, -0.5f, -0.16666667f, -0.25f},
    {-0.8333334f, -0.5833334f, -0.4166667f, -0.2916667f, -0.20833334f, -0.0859375f, -0.0026041667f, 0.f,
     0.0026041667f, 0.0859375f, 0.20833334f, 0.2916667f, 0.4166667f, 0.5833334f, 0.8333334f},
    {11, 10, 13, 12, 15, 14, 9, 0, 8, 1, 6, 7, 4, 5, 2, 3}};

constexpr const FourBitTable& four_bit_table(EncodingKind kind) {
  return is_fp4(kind) ? kFp4Table : kNf4Table;
}

// Of MXFP4, floats of a sign, two exponent bits and one of the mantissa: twice the codes' values, for half of
// the scale 2^(exponent - 127), whose largest one, 2^128, is no fp32 number.
inline constexpr float kMxTwice[16] = {0.f,  1.f,  2.f,  3.f,  4.f,  6.f,  8.f,  12.f,
                                       -0.f, -1.f, -2.f, -3.f, -4.f, -6.f, -8.f, -12.f};
LM_HOST_DEVICE float mx_half_scale(uint8_t exponent) {
  return float_of(exponent < 2 ? 0x00200000U << exponent : (uint32_t{exponent} - 1) << 23);
}

// Values of the 8-bit codes of double scales: the signed "dynamic" map, as for quantized state.
inline constexpr CodeTable kScaleCodes = make_code_table<CodeMap::kSigned8>();
inline constexpr const float (&kDynamicMap)[256] = kScaleCodes.value;

}  // namespace lm
