// A matrix in borrowed memory (the arena, a unit's flat array, a slot): a view is valid as long as that
// memory. Rows are contiguous, with a stride between them. A value, torch-free.
//
// A vector is a view of one column.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/dtype.h"

namespace lm {

struct View {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0, columns = 0;
  int64_t stride = 0;  // elements from one row to the next

  bool defined() const { return data != nullptr; }
  int64_t elements() const { return rows * columns; }
  int64_t bytes() const { return elements() * static_cast<int64_t>(dtype_size(dtype)); }  // without gaps

  float* floats() const { return static_cast<float*>(data); }
  // A range of the rows, or of the columns.
  View row_range(int64_t first, int64_t count) const { return part(first * stride, count, columns); }
  View column_range(int64_t first, int64_t count) const { return part(first, rows, count); }

 private:
  View part(int64_t offset, int64_t part_rows, int64_t part_columns) const {
    auto* const begin = static_cast<std::byte*>(data) + offset * static_cast<int64_t>(dtype_size(dtype));
    return {begin, dtype, part_rows, part_columns, stride};
  }
};

// `memory` as contiguous rows.
inline View view_of(void* memory, DType dtype, int64_t rows, int64_t columns = 1) {
  return {memory, dtype, rows, columns, columns};
}

}  // namespace lm
