// How the bytes of a frozen tensor encode its values: a value for each way. A tensor is one or more pieces
// (codes, and what is needed to read them); whoever computes with it borrows a materialised matrix.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"

namespace lm {

inline constexpr int kMostPieces = 4;  // of a tensor

struct Encoding {
  const char* name = "";  // as the plan shows it
  // Bytes of each piece of a matrix.
  std::vector<int64_t> (*piece_bytes)(int64_t rows, int64_t columns) = nullptr;
  // Writes the matrix as elements of `dtype`, on the CPU. Null: the one piece is the matrix, and is used
  // where it lies.
  void (*materialise)(std::span<const std::byte* const> pieces, int64_t rows, int64_t columns, DType dtype,
                      std::byte* out) = nullptr;
};

// The elements of a type, one after another: fp32 or bf16. Lives as long as the program.
const Encoding& plain_encoding(DType dtype);

}  // namespace lm
