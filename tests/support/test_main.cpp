// The main function of every test: as GoogleTest's, but a run in which a test was skipped ends with 77, which
// ctest counts and names as skipped. A test that did not run must not look like one that passed.
#include <gtest/gtest.h>

#include "tests/support/limit_processor.h"

int main(int argc, char** argv) {
  constexpr int kSkipped = 77;
  lm::test::limit_processor();
  testing::InitGoogleTest(&argc, argv);
  const int failed = RUN_ALL_TESTS();
  if (failed != 0) return failed;
  return testing::UnitTest::GetInstance()->skipped_test_count() > 0 ? kSkipped : 0;
}
