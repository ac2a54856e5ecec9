// The nearest matrix of a rank, where it is known. (tests/e2e/test_loftq.py has numpy's singular values.)
#include "weights/low_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

namespace lm {
namespace {

std::vector<float> drawn(size_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> out(n);
  for (float& x : out) x = normal(generator);
  return out;
}

// a [rows, rank] * b [rank, columns]
std::vector<float> product(const std::vector<float>& a, const std::vector<float>& b, int64_t rows,
                           int64_t columns) {
  const auto rank = std::ssize(a) / rows;
  std::vector<float> out(static_cast<size_t>(rows * columns));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < rank; ++k)
        sum += double{a[static_cast<size_t>(i * rank + k)]} * b[static_cast<size_t>(k * columns + j)];
      out[static_cast<size_t>(i * columns + j)] = static_cast<float>(sum);
    }
  }
  return out;
}

double norm(const std::vector<float>& x) {
  double squares = 0;
  for (const float v : x) squares += double{v} * v;
  return std::sqrt(squares);
}

double rest(const std::vector<float>& matrix, const LowRank& near, int64_t rows, int64_t columns) {
  std::vector<float> out = product(near.left, near.right, rows, columns);
  for (size_t i = 0; i < out.size(); ++i) out[i] = matrix[i] - out[i];
  return norm(out);
}

TEST(LowRank, FindsAMatrixOfThatRank) {
  constexpr int64_t kRows = 150, kColumns = 70, kRank = 5;
  const std::vector<float> matrix =
      product(drawn(kRows * kRank, 1), drawn(kRank * kColumns, 2), kRows, kColumns);
  const LowRank near = low_rank(matrix, kRows, kColumns, kRank, 3, 2);
  EXPECT_LE(rest(matrix, near, kRows, kColumns), 1e-5 * norm(matrix));
  double squares = 0;
  for (size_t k = 0; k < kRank; ++k) {
    squares += near.strengths[k] * near.strengths[k];
    EXPECT_TRUE(k == 0 || near.strengths[k] <= near.strengths[k - 1]);
    double left = 0, right = 0;
    for (size_t i = 0; i < kRows; ++i) left += std::pow(near.left[i * kRank + k], 2);
    for (size_t j = 0; j < kColumns; ++j) right += std::pow(near.right[k * kColumns + j], 2);
    EXPECT_NEAR(left / near.strengths[k], 1, 1e-4);
    EXPECT_NEAR(right / near.strengths[k], 1, 1e-4);
  }
  EXPECT_NEAR(std::sqrt(squares) / norm(matrix), 1, 1e-5);
}

// The cosines of a discrete transform are orthonormal: column k of [n, n].
double cosine(int64_t n, int64_t i, int64_t k) {
  const double pi = std::acos(-1.0), size = static_cast<double>(n);
  return std::sqrt((k == 0 ? 1 : 2) / size) *
         std::cos(pi * (static_cast<double>(i) + 0.5) * static_cast<double>(k) / size);
}

// Singular values that fall as slowly as those of quantization errors.
TEST(LowRank, IsNearlyTheNearest) {
  constexpr int64_t kRows = 300, kColumns = 200, kRank = 8;
  std::vector<float> matrix;
  const auto value = [](int64_t k) { return 1 - static_cast<double>(k) / 300; };
  for (int64_t i = 0; i < kRows; ++i) {
    for (int64_t j = 0; j < kColumns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < kColumns; ++k) sum += value(k) * cosine(kRows, i, k) * cosine(kColumns, j, k);
      matrix.push_back(static_cast<float>(sum));
    }
  }
  double squares = 0;
  for (int64_t k = kRank; k < kColumns; ++k) squares += value(k) * value(k);
  const LowRank near = low_rank(matrix, kRows, kColumns, kRank, 3, 2);
  EXPECT_LE(rest(matrix, near, kRows, kColumns), 1.002 * std::sqrt(squares));
}

// More ranks than the matrix has: the others are empty, and nothing is made of rounding errors.
TEST(LowRank, LeavesWhatIsNotThereEmpty) {
  constexpr int64_t kRows = 20, kColumns = 40, kThere = 3, kRank = 30;
  const std::vector<float> matrix =
      product(drawn(kRows * kThere, 4), drawn(kThere * kColumns, 5), kRows, kColumns);
  const LowRank near = low_rank(matrix, kRows, kColumns, kRank, 6, 1);
  EXPECT_LE(rest(matrix, near, kRows, kColumns), 1e-5 * norm(matrix));
  for (size_t k = 0; k < kRank; ++k) {
    EXPECT_EQ(near.strengths[k] > 0, k < kThere) << k;
    if (k < kThere) continue;
    for (size_t i = 0; i < kRows; ++i) EXPECT_EQ(near.left[i * kRank + k], 0);
  }
  const std::vector<float> nothing(static_cast<size_t>(kRows * kColumns), 0.0F);
  const LowRank empty = low_rank(nothing, kRows, kColumns, 2, 7, 2);
  EXPECT_EQ(norm(empty.left), 0);
  EXPECT_EQ(empty.strengths, std::vector<double>(2, 0.0));
}

TEST(LowRank, HasTheSameBitsWithAnyNumberOfThreads) {
  constexpr int64_t kRows = 203, kColumns = 131;
  const std::vector<float> matrix = drawn(kRows * kColumns, 8);
  const LowRank one = low_rank(matrix, kRows, kColumns, 20, 9, 1);
  for (const int threads : {2, 5}) {
    const LowRank more = low_rank(matrix, kRows, kColumns, 20, 9, threads);
    EXPECT_EQ(one.left, more.left);
    EXPECT_EQ(one.right, more.right);
  }
}

}  // namespace
}  // namespace lm
