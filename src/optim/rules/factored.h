// Rules whose second moment is factored: of a matrix they keep what the squares of its rows and of its
// columns average to, rows + columns numbers in place of rows * columns; of a vector, a number for each
// element. The matrices are those of the files, however they lie together here. Pure values.
//
// A step of a matrix (kernels/factored_formula.h has the order of the sums):
//
//   row = fma(1 - beta2, mean over the row of g * g + square_eps, beta2 * row), a column likewise
//   direction = g * 1 / (sqrt(row / mean of all rows) + root_eps) * 1 / (sqrt(column) + root_eps)
//   p = p * decay - factor * direction
//
// and of a vector: v = fma(1 - beta2, g * g + square_eps, beta2 * v), direction = g * 1 / (sqrt(v) +
// root_eps). What `decay` and `factor` are is the rule's: it makes them, once for the matrix, of the sums
// over all of it.
//
//   static constexpr bool kFactored = true;
//   static constexpr auto kStreams = factored_streams(DType::kF32);
//   float beta2, one_minus_beta2, square_eps, root_eps;
//   LM_HOST_DEVICE bool counts_weights(const Rule& rule);  // whether sums.weights is asked for
//   LM_HOST_DEVICE FactoredStep step(const Rule& rule, const FactoredSums& sums);
#pragma once

#include "optim/rules/rule.h"

namespace lm {

struct FactoredSums {
  float directions = 0, weights = 0;  // sums of squares, before the update
  float elements = 0;
};
struct FactoredStep {
  float factor = 0, decay = 1;
};

constexpr std::array<StateStream, 3> factored_streams(DType type) {
  return {StateStream{"rows", "second moment", type, StreamOf::kRows},
          StateStream{"columns", "second moment", type, StreamOf::kColumns},
          StateStream{"v", "second moment", type, StreamOf::kVectors}};
}

// Columns are summed in this many parts at most, so that threads share the work: rows of a part.
constexpr int64_t factored_part(int64_t rows) {
  constexpr int64_t kMostParts = 64, kLeastRows = 64;
  const int64_t each = (rows + kMostParts - 1) / kMostParts;
  return each > kLeastRows ? each : kLeastRows;
}
constexpr int64_t factored_parts(int64_t rows) {
  return (rows + factored_part(rows) - 1) / factored_part(rows);
}
// fp32 numbers that an update of a matrix works with beside its state: a row's sum, factor and sums of
// squares, a column's factor and its sums of parts, and what the step is.
constexpr int64_t factored_scratch(int64_t rows, int64_t columns) {
  return 4 + 3 * rows + (1 + factored_parts(rows)) * columns;
}

}  // namespace lm
