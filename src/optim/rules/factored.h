// Rules with factored second moments: for a matrix they keep the mean squares of its rows and of its columns,
// rows + columns numbers in place of rows * columns; for a vector, one number per element. The matrices are
// those of the files, even if they are fused here. Pure values.
//
// A step of a matrix (kernels/factored_formula.h has the order of the sums):
//
//   row = fma(1 - beta2, mean over the row of g * g + square_eps, beta2 * row), a column likewise
//   direction = g * 1 / (sqrt(row / mean of all rows) + root_eps) * 1 / (sqrt(column) + root_eps)
//   p = p * decay - factor * direction
//
// and of a vector: v = fma(1 - beta2, g * g + square_eps, beta2 * v), direction = g * 1 / (sqrt(v) +
// root_eps). The rule computes `decay` and `factor`, once per matrix, from the sums over all of it.
//
//   static constexpr bool kFactored = true;
//   static constexpr auto kStateTensors = factored_state_tensors(DType::kF32);
//   float beta2, one_minus_beta2, square_eps, root_eps;
// LM_HOST_DEVICE bool counts_weights(const Rule& rule); // whether sums.weights is needed
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

constexpr std::array<StateTensor, 3> factored_state_tensors(DType type) {
  return {StateTensor{"rows", "second moment", type, StateTensorOf::kRows},
          StateTensor{"columns", "second moment", type, StateTensorOf::kColumns},
          StateTensor{"v", "second moment", type, StateTensorOf::kVectors}};
}

// Columns are summed in this many parts at most, for parallelism; returns the rows of a part.
constexpr int64_t factored_part(int64_t rows) {
  constexpr int64_t kMostParts = 64, kLeastRows = 64;
  const int64_t each = (rows + kMostParts - 1) / kMostParts;
  return each > kLeastRows ? each : kLeastRows;
}
constexpr int64_t factored_parts(int64_t rows) {
  return (rows + factored_part(rows) - 1) / factored_part(rows);
}
// The fp32 scratch numbers of an update of a matrix: per row its sum, factor and sums of squares, per column
// its factor and partial sums, and the step's scalars.
constexpr int64_t factored_scratch(int64_t rows, int64_t columns) {
  return 4 + 3 * rows + (1 + factored_parts(rows)) * columns;
}

}  // namespace lm
