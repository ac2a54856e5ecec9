// The best approximation of a given rank, by randomized subspace iteration (Halko, Martinsson, Tropp:
// "Finding structure with randomness", algorithm 4.4). Torch-free; the caller owns the memory. The result has
// the same bits for any number of threads and on every kind of x86-64.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lm {

// left [rows, rank] * right [rank, columns], row-major. Singular value i of the matrix is split equally: its
// column of `left` and its row of `right` both have the length sqrt(strengths[i]).
struct LowRank {
  std::vector<float> left, right;
  std::vector<double> strengths;  // singular values, descending; 0 beyond the rank of the matrix
};

// `matrix` [rows, columns], row-major. For weights' quantization errors the norm of the residual is within 1
// % of the minimum. 10 passes over the matrix, each with 2 * (rank + 16) operations per element.
LowRank low_rank(std::span<const float> matrix, int64_t rows, int64_t columns, int64_t rank, uint64_t seed,
                 int threads);

}  // namespace lm
