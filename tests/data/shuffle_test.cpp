#include "data/shuffle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

namespace lm {
namespace {

TEST(Permutation, IsABijection) {
  for (const int64_t size : {0, 1, 2, 3, 5, 16, 17, 255, 256, 257, 1000, 4097}) {
    const Permutation permutation(size, 42, 3, ShufflePurpose::kEpoch);
    std::set<int64_t> seen;
    for (int64_t i = 0; i < size; ++i) {
      const int64_t to = permutation(i);
      EXPECT_GE(to, 0);
      EXPECT_LT(to, size);
      seen.insert(to);
    }
    EXPECT_EQ(static_cast<int64_t>(seen.size()), size);
  }
}

TEST(Permutation, DependsOnSeedEpochAndPurpose) {
  const auto list = [](int64_t seed, int64_t epoch, ShufflePurpose purpose) {
    const Permutation permutation(100, seed, epoch, purpose);
    std::vector<int64_t> out;
    for (int64_t i = 0; i < 100; ++i) out.push_back(permutation(i));
    return out;
  };
  const auto base = list(1, 0, ShufflePurpose::kEpoch);
  EXPECT_EQ(base, list(1, 0, ShufflePurpose::kEpoch));
  EXPECT_NE(base, list(2, 0, ShufflePurpose::kEpoch));
  EXPECT_NE(base, list(1, 1, ShufflePurpose::kEpoch));
  EXPECT_NE(base, list(1, 0, ShufflePurpose::kEvalSplit));
  EXPECT_NE(base, list(1LL << 40 | 1, 0, ShufflePurpose::kEpoch));
}

// Chi-square over (index, image) and over pairs of neighbours' images: with 20 000 draws a fair shuffle
// exceeds mean + 6 sigma about once in 10^8.
TEST(Permutation, SendsEveryIndexEverywhereEquallyOften) {
  constexpr int64_t kSize = 12, kDraws = 20000;
  std::vector<double> single(kSize * kSize, 0.0), pair(kSize * kSize, 0.0);
  for (int64_t draw = 0; draw < kDraws; ++draw) {
    const Permutation permutation(kSize, 5, draw, ShufflePurpose::kEpoch);
    for (int64_t i = 0; i < kSize; ++i) ++single[static_cast<size_t>(i * kSize + permutation(i))];
    ++pair[static_cast<size_t>(permutation(0) * kSize + permutation(1))];
  }
  double single_chi = 0.0, pair_chi = 0.0;
  for (int64_t a = 0; a < kSize; ++a) {
    for (int64_t b = 0; b < kSize; ++b) {
      const auto at = static_cast<size_t>(a * kSize + b);
      const double expected = static_cast<double>(kDraws) / kSize;
      single_chi += (single[at] - expected) * (single[at] - expected) / expected;
      const double expected_pair = static_cast<double>(kDraws) / (kSize * (kSize - 1));
      if (a != b) pair_chi += (pair[at] - expected_pair) * (pair[at] - expected_pair) / expected_pair;
      EXPECT_TRUE(a != b || pair[at] == 0.0);
    }
  }
  const double freedom = (kSize - 1) * (kSize - 1), pair_freedom = kSize * (kSize - 1) - 1;
  EXPECT_LT(single_chi, freedom + 6.0 * std::sqrt(2.0 * freedom));
  EXPECT_LT(pair_chi, pair_freedom + 6.0 * std::sqrt(2.0 * pair_freedom));
}

}  // namespace
}  // namespace lm
