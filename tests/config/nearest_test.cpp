#include "config/nearest.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"
#include "config/config_toml.h"

namespace lm {

// Searches for a nearest word. The linker sends the calls of `nearest` here (CMakeLists.txt).
static int searches = 0;
#define LM_NEAREST                                                                                      \
  "_ZN2lm7nearestESt17basic_string_viewIcSt11char_traitsIcEERKSt6vectorINSt7__cxx1112basic_stringIcS2_" \
  "SaIcEEESaIS8_EE"
std::optional<std::string> nearest_itself(std::string_view,
                                          const std::vector<std::string>&) asm("__real_" LM_NEAREST);
std::optional<std::string> counted_nearest(std::string_view,
                                           const std::vector<std::string>&) asm("__wrap_" LM_NEAREST);
std::optional<std::string> counted_nearest(std::string_view word,
                                           const std::vector<std::string>& candidates) {
  ++searches;
  return nearest_itself(word, candidates);
}

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

// A suggestion for each of them would take seconds.
TEST(Nearest, OfVeryManyMistakesTheFirstAloneGetSuggestions) {
  std::string text = "[train]\n";
  for (int i = 0; i < 70000; ++i) text += "qzx" + std::to_string(i) + " = 1\n";
  searches = 0;
  std::string report;
  try {
    parse_config(text, "c.toml");
  } catch (const Error& error) {
    report = error.report();
  }
  EXPECT_NE(report.find("70002 mistakes:"), std::string::npos) << report;
  EXPECT_NE(report.find("and 69952 more"), std::string::npos) << report;
  EXPECT_LT(report.size(), 8192u);
  EXPECT_GE(searches, 50);  // each in up to three lists of words
  EXPECT_LE(searches, 150);
}

}  // namespace
}  // namespace lm
