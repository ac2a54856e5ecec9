#include "spec/encoding.h"

#include "base/error.h"

namespace lm {
namespace {

template <DType dtype>
std::vector<int64_t> elements(int64_t rows, int64_t columns) {
  return {rows * columns * static_cast<int64_t>(dtype_size(dtype))};
}

constexpr Encoding kPlain[] = {{dtype_name(DType::kF32), elements<DType::kF32>, nullptr},
                               {dtype_name(DType::kBF16), elements<DType::kBF16>, nullptr}};

}  // namespace

const Encoding& plain_encoding(DType dtype) {
  LM_CHECK(dtype == DType::kF32 || dtype == DType::kBF16, dtype_name(dtype));
  return kPlain[dtype == DType::kF32 ? 0 : 1];
}

}  // namespace lm
