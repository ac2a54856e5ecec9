#include "base/error.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

TEST(Error, ReportsAreaCodePlaceAndNextStep) {
  const Error error(Exit::kInput, {.area = "FILE-21",
                                   .what = "truncated",
                                   .place = "a\x1b[1m.safetensors",
                                   .next = "download it again",
                                   .kept = ""});
  EXPECT_EQ(
      error.report(),
      "lmlaunch: error FILE-21 (exit 11): truncated at a\\x1b[1m.safetensors\n  next: download it again\n");
}

TEST(Error, AdvisesTwoWaysWhereThereAreTwo) {
  const ErrorText both{
      .area = "IO-02", .what = "full", .next = "free space", .otherwise = "use another disk"};
  EXPECT_EQ(both.advice(), "free space, or use another disk");
  EXPECT_EQ(Error(Exit::kNoSpace, both).report(),
            "lmlaunch: error IO-02 (exit 20): full\n  next: free space, or use another disk\n");
  EXPECT_EQ((ErrorText{.area = "", .what = "", .next = "free space"}).advice(), "free space");
  EXPECT_EQ((ErrorText{.area = "", .what = "", .otherwise = "use another disk"}).advice(),
            "use another disk");
  EXPECT_EQ(ErrorText{}.advice(), "");
}

TEST(Error, EveryExitCodeHasOneRow) {
  int last = -1;
  for (const ExitCode& row : exit_codes()) {
    EXPECT_GT(static_cast<int>(row.code), last);
    EXPECT_LT(static_cast<int>(row.code), 126);
    EXPECT_NE(std::string(row.reason), "");
    EXPECT_NE(std::string(row.meaning), "");
    last = static_cast<int>(row.code);
  }
}

TEST(Error, ACheckThatFailsIsABug) {
  try {
    LM_CHECK(1 == 2, "arithmetic");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kInternal);
  }
}

}  // namespace
}  // namespace lm
