#include "config/nearest.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace lm {
namespace {

TEST(Nearest, CountsSwapsAsOne) {
  EXPECT_EQ(edit_distance("stpes", "steps"), 1);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
  EXPECT_EQ(edit_distance("", "abc"), 3);
  EXPECT_EQ(nearest("epoch", {"steps", "epochs"}), "epochs");
  EXPECT_FALSE(nearest("completely_else", {"steps", "epochs"}).has_value());
  EXPECT_EQ(nearest("steps", {"bteps", "steps_"}), "steps_");  // as near, and begins alike
}

TEST(Nearest, CountsNoFurtherThanItIsAsked) {
  for (const auto& [a, b] :
       {std::pair("abdcf", "abcde"), {"abdc_", "sitting"}, {"ba", "ab"}, {"cab", "abc"}, {"", "abc"}}) {
    const int changes = edit_distance(a, b);
    for (int most = 0; most < 8; ++most) EXPECT_EQ(edit_distance(a, b, most), std::min(changes, most + 1));
  }
}

TEST(Nearest, AWordThatSharesTooLittleHidesNoOther) {
  // Three changes of six letters are too many, four of ten are not.
  EXPECT_EQ(nearest("abcdef", {"abcxyz", "abcdefghij"}), "abcdefghij");
}

}  // namespace
}  // namespace lm
