#include "weights/row_lengths.h"

#include <cmath>
#include <cstring>
#include <memory>

#include "weights/convert.h"
#include "weights/encode.h"
#include "weights/loader.h"
#include "weights/stored.h"

namespace lm {
namespace {

// Dequantized, whole.
MatrixRows decoded_rows(std::vector<float> values, int64_t columns) {
  return [all = std::make_shared<std::vector<float>>(std::move(values)), columns](int64_t first, int64_t rows,
                                                                                  float* to) {
    std::memcpy(to, all->data() + first * columns, static_cast<size_t>(rows * columns) * sizeof(float));
  };
}

}  // namespace

MatrixRows rows_of_base(const TensorPlace& weight, size_t part, const ModelFiles* files,
                        const MatrixElements& drawn, DType dtype, int threads) {
  const ParameterPart& of_files = weight.parameter.parts[part];
  const int64_t rows = of_files.rows, columns = weight.parameter.columns;
  const auto values = [&] { return std::vector<float>(static_cast<size_t>(rows * columns)); };
  if (weight.encoded() && files != nullptr) {
    if (const auto stored = find_stored(*files, of_files, columns)) {
      std::vector<float> out = values();
      decode_stored(*stored, rows, columns, out.data(), threads);
      return decoded_rows(std::move(out), columns);
    }
  }
  const MatrixElements elements =
      files != nullptr ? elements_of(*files, weight.parameter, part, dtype) : drawn;
  if (weight.encoded()) {
    PieceMemory pieces;
    const EncodedMatrix matrix = matrix_in(pieces, weight.encoding(), rows, columns);
    encode(matrix, dtype, elements, threads);
    std::vector<float> out = values();
    decode(matrix, out.data(), threads);
    return decoded_rows(std::move(out), columns);
  }
  return [elements, dtype, columns](int64_t first, int64_t n, float* to) {
    std::vector<std::byte> raw(static_cast<size_t>(n * columns) * dtype_size(dtype));
    elements(first * columns, n * columns, raw.data());
    convert_elements(raw.data(), dtype, reinterpret_cast<std::byte*>(to), DType::kF32, n * columns);
  };
}

std::vector<float> row_lengths(const AdaptedMatrix& matrix, int threads) {
  const int64_t columns = matrix.columns, rank = std::ssize(matrix.a) / columns;
  std::vector<float> out(static_cast<size_t>(matrix.rows));
  for_each_range(threads, matrix.rows, 16, [&](int64_t begin, int64_t end) {
    std::vector<float> weight(static_cast<size_t>(columns));
    std::vector<double> row(weight.size());
    for (int64_t i = begin; i < end; ++i) {
      matrix.weight(i, 1, weight.data());
      row.assign(weight.begin(), weight.end());
      for (int64_t k = 0; k < rank; ++k) {
        const double factor = matrix.scale * matrix.b[static_cast<size_t>(i * rank + k)];
        if (factor == 0) continue;
        const float* const a = matrix.a.data() + k * columns;
        for (int64_t j = 0; j < columns; ++j) row[static_cast<size_t>(j)] += factor * a[j];
      }
      double squares = 0;
      for (const double value : row) squares += value * value;
      out[static_cast<size_t>(i)] = static_cast<float>(std::sqrt(squares));
    }
  });
  return out;
}

}  // namespace lm
