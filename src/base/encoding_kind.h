// The quantization formats of a frozen matrix and their sizes: bitsandbytes' formats, bit for bit, and one of
// the Open Compute Project.
#pragma once

#include <cstdint>

namespace lm {

enum class EncodingKind : uint8_t {
  kPlain,      // the elements themselves
  kNf4,        // 4-bit codes of the quantiles of a normal distribution, one fp32 scale per block
  kFp4,        // the same with 4-bit floats
  kNf4Double,  // the scales are 8-bit codes with their own scales ("double quantization")
  kFp4Double,
  kInt8,   // 8-bit integers, an fp32 scale for each row
  kMxfp4,  // MXFP4: 4-bit floats, a power of two for each 32 of a row; only read, and of experts alone
};

constexpr bool is_fp4(EncodingKind kind) {
  return kind == EncodingKind::kFp4 || kind == EncodingKind::kFp4Double;
}
constexpr bool has_double_scales(EncodingKind kind) {
  return kind == EncodingKind::kNf4Double || kind == EncodingKind::kFp4Double;
}
// Codes of bitsandbytes.
constexpr bool is_four_bit(EncodingKind kind) {
  return is_fp4(kind) || kind == EncodingKind::kNf4 || kind == EncodingKind::kNf4Double;
}

inline constexpr int64_t kScaleBlock = 64;    // 4-bit codes that share a scale
inline constexpr int64_t kMxBlock = 32;       // codes of MXFP4 that share a scale
inline constexpr int64_t kNestedBlock = 256;  // 8-bit scales that share one
inline constexpr int kMostPieces = 3;         // of a matrix
inline constexpr int kMostParts = 3;          // matrices of the files that are one of ours (q, k, v)

}  // namespace lm
