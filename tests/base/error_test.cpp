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
