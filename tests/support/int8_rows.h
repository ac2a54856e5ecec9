// A toy encoding of frozen matrices that no source knows: int8 codes, and an fp32 scale for each row. It
// shows that an encoding is a value.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "spec/encoding.h"

namespace lm::test {

inline void write_element(float value, DType dtype, std::byte* out) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  if (dtype == DType::kF32) {
    std::memcpy(out, &bits, 4);
    return;
  }
  const auto rounded = static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  std::memcpy(out, &rounded, 2);
}

inline void int8_rows_materialise(std::span<const std::byte* const> pieces, int64_t rows, int64_t columns,
                                  DType dtype, std::byte* out) {
  const auto* const codes = reinterpret_cast<const int8_t*>(pieces[0]);
  const auto* const scales = reinterpret_cast<const float*>(pieces[1]);
  for (int64_t i = 0; i < rows * columns; ++i, out += dtype_size(dtype))
    write_element(static_cast<float>(codes[i]) * scales[i / columns], dtype, out);
}

inline constexpr Encoding kInt8Rows = {"int8 rows",
                                       [](int64_t rows, int64_t columns) -> std::vector<int64_t> {
                                         return {rows * columns, rows * 4};
                                       },
                                       int8_rows_materialise};

// Codes and scales of `values` [rows, columns].
struct Int8Rows {
  std::vector<int8_t> codes;
  std::vector<float> scales;
};
inline Int8Rows int8_rows(const std::vector<float>& values, int64_t columns) {
  Int8Rows out;
  for (auto row = values.begin(); row != values.end(); row += columns) {
    float most = 0;
    for (auto x = row; x != row + columns; ++x) most = std::max(most, std::abs(*x));
    const float scale = most > 0 ? most / 127 : 1;
    out.scales.push_back(scale);
    for (auto x = row; x != row + columns; ++x)
      out.codes.push_back(static_cast<int8_t>(std::lround(*x / scale)));
  }
  return out;
}

}  // namespace lm::test
