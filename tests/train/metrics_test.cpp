#include "train/metrics.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

TEST(StepWork, CountsTargetsAndTheSquaresOfDocumentsOverAllMicroBatches) {
  StepBatches step;
  step.micro.push_back({.token = {1, 2, 3, 4, 5},
                        .position = {0, 1, 2, 0, 1},
                        .target = {-1, 3, -1, 5, -1},
                        .sample = {0, 0, 0, 1, 1},
                        .document_start = {0, 3, 5}});
  step.micro.push_back(
      {.token = {7}, .position = {0}, .target = {-1}, .sample = {2}, .document_start = {0, 1}});
  const StepWork work = work_of(step);
  EXPECT_EQ(work.tokens, 6);
  EXPECT_EQ(work.target_rows, 2);
  EXPECT_EQ(work.squares, 9 + 4 + 1);
}

TEST(HiddenPct, IsTheShareOfTransferTimeThatNobodyWaitedFor) {
  EXPECT_EQ(hidden_pct(0, 0), 100);  // nothing moved
  EXPECT_EQ(hidden_pct(2, 0.5), 75);
  EXPECT_EQ(hidden_pct(2, 2.5), 0);  // waited, too, for a transfer that had not begun
}

}  // namespace
}  // namespace lm
