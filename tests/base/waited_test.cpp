#include "base/waited.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

TEST(Waited, CountsWhatLiesBetweenLooks) {
  Waited waited(100);
  EXPECT_DOUBLE_EQ(waited.look(100.25), 0.25);
  EXPECT_DOUBLE_EQ(waited.look(100.25), 0.25);
  EXPECT_DOUBLE_EQ(waited.look(101), 1);
  for (int i = 1; i <= 40; ++i) EXPECT_DOUBLE_EQ(waited.look(101 + i * 0.5), 1 + i * 0.5);
}

TEST(Waited, DoesNotCountForHowLongNobodyCouldLook) {
  Waited waited(100);
  waited.look(100.5);
  EXPECT_DOUBLE_EQ(waited.look(100.5 + 8 * 3600), 0.5 + Waited::kMost);
  EXPECT_DOUBLE_EQ(waited.look(101 + 8 * 3600), 1 + Waited::kMost);
}

}  // namespace
}  // namespace lm
