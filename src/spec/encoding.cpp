#include "spec/encoding.h"

#include <string_view>

#include "base/bytes.h"
#include "base/error.h"

namespace lm {
namespace {

constexpr int64_t kFloat = sizeof(float);

template <DType dtype>
std::vector<int64_t> elements(int64_t rows, int64_t columns) {
  return {rows * columns * static_cast<int64_t>(dtype_size(dtype))};
}

std::vector<int64_t> four_bits(int64_t rows, int64_t columns) {
  const int64_t n = rows * columns;
  return {ceil_div(n, 2), ceil_div(n, kScaleBlock) * kFloat};
}

std::vector<int64_t> four_bits_double(int64_t rows, int64_t columns) {
  const int64_t n = rows * columns, scales = ceil_div(n, kScaleBlock);
  return {ceil_div(n, 2), scales, (1 + ceil_div(scales, kNestedBlock)) * kFloat};
}

std::vector<int64_t> eight_bits(int64_t rows, int64_t columns) {
  return {rows * columns, rows * kFloat};
}

std::vector<int64_t> microscaled(int64_t rows, int64_t columns) {
  return {rows * columns / 2, rows * columns / kMxBlock};
}

constexpr Encoding kPlain[] = {{dtype_name(DType::kF32), EncodingKind::kPlain, elements<DType::kF32>},
                               {dtype_name(DType::kBF16), EncodingKind::kPlain, elements<DType::kBF16>},
                               {dtype_name(DType::kF16), EncodingKind::kPlain, elements<DType::kF16>}};

constexpr Encoding kQuantized[] = {{"nf4", EncodingKind::kNf4, four_bits},
                                   {"fp4", EncodingKind::kFp4, four_bits},
                                   {"nf4, double", EncodingKind::kNf4Double, four_bits_double},
                                   {"fp4, double", EncodingKind::kFp4Double, four_bits_double},
                                   {"int8", EncodingKind::kInt8, eight_bits},
                                   {"mxfp4", EncodingKind::kMxfp4, microscaled}};

}  // namespace

const Encoding& plain_encoding(DType dtype) {
  for (const Encoding& one : kPlain) {
    if (std::string_view(one.name) == dtype_name(dtype)) return one;
  }
  LM_CHECK(false, dtype_name(dtype));
}

const Encoding& encoding_of(EncodingKind kind) {
  LM_CHECK(kind != EncodingKind::kPlain, "a plain encoding is of a type");
  for (const Encoding& one : kQuantized) {
    if (one.kind == kind) return one;
  }
  LM_CHECK(false, "an encoding without a row in the table");
}

}  // namespace lm
