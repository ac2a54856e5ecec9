#include "launcher/refusal_text.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

TEST(RefusalText, ComesBackAsItWas) {
  const Error error(Exit::kNoSpace, {.area = "IO-02",
                                     .what = "full: \"quoted\"\n",
                                     .place = "a/b",
                                     .next = "free space",
                                     .kept = "step 3",
                                     .otherwise = "use another disk"});
  const Error back = parse_refusal(refusal_text(error));
  EXPECT_EQ(back.code(), Exit::kNoSpace);
  EXPECT_EQ(back.report(), error.report());
  EXPECT_EQ(back.text().otherwise, "use another disk");
}

}  // namespace
}  // namespace lm
