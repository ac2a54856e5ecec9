#include "train/metrics.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <set>

#include "base/file.h"
#include "train/event_file.h"

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

TEST(MetricsFile, HasTheColumnsOfAnObjective) {
  const std::string path = testing::TempDir() + "/columns_" + std::to_string(getpid()) + ".jsonl";
  StepRow row;
  row.columns.emplace_back("margin", 0.25);
  MetricsFile(path).write(row);
  EXPECT_NE(read_small_file(path, 4096).find(R"("margin":0.25)"), std::string::npos);
  std::filesystem::remove(path);
}

// Readers go through them by name: a start that follows another one within its second, or a clock put back,
// comes behind it all the same.
TEST(EventFile, OfALaterStartSortsBehindThoseOfEarlierOnes) {
  namespace fs = std::filesystem;
  const fs::path directory = fs::path(testing::TempDir()) / ("event_files_" + std::to_string(getpid()));
  std::set<std::string> before;
  for (int start = 0; start < 4; ++start) {
    const EventFile file(directory);
    std::set<std::string> now;
    for (const auto& entry : fs::directory_iterator(directory)) now.insert(entry.path().filename());
    ASSERT_EQ(now.size(), before.size() + 1);
    EXPECT_FALSE(before.contains(*now.rbegin())) << *now.rbegin();
    before = now;
  }
  fs::remove_all(directory);
}

}  // namespace
}  // namespace lm
