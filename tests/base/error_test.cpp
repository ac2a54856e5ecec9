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
