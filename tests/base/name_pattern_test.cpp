#include "base/name_pattern.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

const char kName[] = "model.layers.10.self_attn.q_proj.weight";

TEST(NamePattern, MatchesRunsOfWholeSegments) {
  for (const char* const in : {"q_proj", "model.layers", "layers.10", "weight", "model", kName})
    EXPECT_TRUE(NamePattern(in).matches(kName)) << in;
  for (const char* const out : {"q_pro", "proj", "layers.1", "ayers.10", "model.self_attn", "k_proj",
                                ".q_proj", "q_proj.", "model.layers.10.self_attn.q_proj.weight.x"})
    EXPECT_FALSE(NamePattern(out).matches(kName)) << out;
  // A later place may be whole where the first is none.
  EXPECT_TRUE(NamePattern("proj").matches("q_proj.proj"));
}

TEST(NamePattern, FindsARegularExpressionAnywhere) {
  for (const char* const in :
       {"regex:[qk]_proj", "regex:layers\\.(9|10)\\.", "regex:weight$", "regex:^model"})
    EXPECT_TRUE(NamePattern(in).matches(kName)) << in;
  for (const char* const out : {"regex:layers\\.1\\.", "regex:^q_proj", "regex:bias$"})
    EXPECT_FALSE(NamePattern(out).matches(kName)) << out;
}

TEST(NamePattern, ExplainsWhatIsNone) {
  EXPECT_EQ(NamePattern::mistake("q_proj"), "");
  EXPECT_EQ(NamePattern::mistake("regex:[qk]_proj"), "");
  EXPECT_NE(NamePattern::mistake(""), "");
  EXPECT_NE(NamePattern::mistake("regex:[q"), "");
  EXPECT_EQ(NamePattern::mistake("[q"), "") << "no expression without regex:";
}

TEST(NamePattern, ListsRunsOfSegments) {
  EXPECT_EQ(segment_runs("a.b.c", 1), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(segment_runs("a.b.c", 2), (std::vector<std::string>{"a.b", "b.c"}));
  EXPECT_EQ(segment_runs("a.b.c", 3), (std::vector<std::string>{"a.b.c"}));
  EXPECT_TRUE(segment_runs("a.b.c", 4).empty());
}

}  // namespace
}  // namespace lm
