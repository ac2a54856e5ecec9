// How the bytes of a frozen tensor encode its values: a value for each way. A matrix of the files is one or
// more pieces (codes, and what is needed to read them); whoever computes with it borrows the materialised
// matrix (kernels.h: Materialise).
#pragma once

#include <cstdint>
#include <vector>

#include "base/dtype.h"
#include "base/encoding_kind.h"

namespace lm {

struct Encoding {
  const char* name = "";  // as the plan shows it
  EncodingKind kind = EncodingKind::kPlain;
  // Bytes of each piece of a matrix: the elements, if it is plain and used where it lies; 4-bit codes, the
  // first of two in the high half of a byte, then scales; with double scales codes, codes of the scales, then
  // as fp32 the scales' mean and the scales' scales; 8-bit codes, then scales. Of MXFP4 codes, the first of
  // two in the low half of a byte, then the scales' exponents, one byte each; columns are a multiple of
  // kMxBlock.
  std::vector<int64_t> (*piece_bytes)(int64_t rows, int64_t columns) = nullptr;
  bool plain() const { return kind == EncodingKind::kPlain; }
};

// The elements of a type, one after another: fp32, bf16 or fp16. Lives as long as the program, like every
// encoding.
const Encoding& plain_encoding(DType dtype);
// Of any kind but kPlain.
const Encoding& encoding_of(EncodingKind kind);

}  // namespace lm
