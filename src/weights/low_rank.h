// The nearest matrix of a given rank, by randomized subspace iteration (Halko, Martinsson, Tropp: "Finding
// structure with randomness", algorithm 4.4). Torch-free; the caller owns the memory. The result has the same
// bits for any number of threads and on every kind of x86-64.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lm {

// left [rows, rank] * right [rank, columns], row-major. Singular value i of the matrix is shared out equally:
// the column of `left` and the row of `right` that belong to it have the length sqrt(strengths[i]) each.
struct LowRank {
  std::vector<float> left, right;
  std::vector<double> strengths;  // singular values, falling; 0 where the matrix has no more to give
};

// `matrix` [rows, columns], row-major. What is left of it has a norm within 1 % of the least that is possible
// for weights' quantisation errors. 10 passes over the matrix, 2 * (rank + 16) operations an element each.
LowRank low_rank(std::span<const float> matrix, int64_t rows, int64_t columns, int64_t rank, uint64_t seed,
                 int threads);

}  // namespace lm
