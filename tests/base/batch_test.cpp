#include "base/batch.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>

namespace lm {
namespace {

TEST(Batch, RowsAreRoundedToFewNumbers) {
  std::set<int64_t> different;
  for (int64_t tokens = 1; tokens <= 16384; ++tokens) {
    const int64_t rows = rounded_rows(tokens);
    EXPECT_GE(rows, tokens);
    EXPECT_LT(static_cast<double>(rows - tokens), std::max(32.0, 0.125 * static_cast<double>(tokens)));
    if (tokens > 1024 && tokens <= 4096) different.insert(rows);
  }
  EXPECT_EQ(different.size(), 16U);
  for (const int64_t power : {32, 64, 512, 2048}) EXPECT_EQ(rounded_rows(power), power);
}

}  // namespace
}  // namespace lm
