// The lengths of the rows of an adapted matrix: what DoRA's magnitudes begin with, so that a fresh adapter
// changes nothing. Torch-free; the caller owns the memory.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "spec/block_layout.h"
#include "weights/encode.h"
#include "weights/model_files.h"

namespace lm {

// Writes rows [first, first + rows) of a matrix as fp32. Called by several threads at once.
using MatrixRows = std::function<void(int64_t first, int64_t rows, float* to)>;

// Rows of part `part` of `weight` as the run computes with them: rounded to `dtype`, or quantized and
// dequantized, when the result holds the matrix in fp32. From `files`, or, if it is null, as `drawn` has its
// elements in `dtype`.
MatrixRows rows_of_base(const TensorPlace& weight, size_t part, const ModelFiles* files,
                        const MatrixElements& drawn, DType dtype, int threads);

// |W + s B A| of each row, added in fp64. a: [r, columns], b: [rows, r].
struct AdaptedMatrix {
  MatrixRows weight;
  int64_t rows = 0, columns = 0;
  std::span<const float> a, b;
  double scale = 1;
};
std::vector<float> row_lengths(const AdaptedMatrix& matrix, int threads);

}  // namespace lm
