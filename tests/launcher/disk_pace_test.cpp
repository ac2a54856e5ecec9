// When a run says that its disks are slower than planned.
#include "launcher/worker/disk_pace.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

constexpr DiskStep kPlanned{.seconds = 1, .disk_seconds = 0.8, .wait_seconds = 0, .bytes = 3'100'000'000};

// How many of so many equal steps say something; the first is another one.
int said(const DiskStep& step, int steps, std::string* text = nullptr) {
  DiskPace pace(kPlanned);
  int count = 0;
  for (int i = 0; i < steps; ++i) {
    const auto message = pace.see(i == 0 ? DiskStep{.seconds = 100, .wait_seconds = 99, .bytes = 1} : step);
    count += message ? 1 : 0;
    if (message && text != nullptr) *text = *message;
  }
  return count;
}

TEST(DiskPace, SaysOnceThatDisksAreSlowerThanPlanned) {
  const DiskStep slow{.seconds = 2.4, .disk_seconds = 2.2, .wait_seconds = 1.4, .bytes = kPlanned.bytes};
  std::string text;
  EXPECT_EQ(said(slow, DiskPace::kWindow), 0);
  EXPECT_EQ(said(slow, 1 + DiskPace::kWindow, &text), 1);
  EXPECT_EQ(said(slow, 100), 1);
  EXPECT_NE(text.find("disks move 1.41 GB/s"), std::string::npos) << text;
  EXPECT_NE(text.find("made for 3.88"), std::string::npos) << text;
  EXPECT_NE(text.find("2.4 times"), std::string::npos) << text;
}

TEST(DiskPace, IsQuietWhereDisksAreNotTheReason) {
  // As planned; slower, but hidden; waits that the plan knows; slow compute, which disks wait for.
  EXPECT_EQ(said(kPlanned, 100), 0);
  EXPECT_EQ(said({.seconds = 2, .disk_seconds = 1.9, .wait_seconds = 0.1, .bytes = kPlanned.bytes}, 100), 0);
  EXPECT_EQ(said({.seconds = 1.1, .disk_seconds = 1, .wait_seconds = 0.5, .bytes = kPlanned.bytes}, 100), 0);
  EXPECT_EQ(said({.seconds = 2, .disk_seconds = 0.7, .wait_seconds = 0.5, .bytes = kPlanned.bytes}, 100), 0);
  DiskPace nothing({.seconds = 1});
  for (int i = 0; i < 100; ++i)
    EXPECT_FALSE(nothing.see({.seconds = 9, .disk_seconds = 1, .wait_seconds = 5, .bytes = 0}));
}

TEST(DiskPace, SeesADiskThatBecomesSlow) {
  DiskPace pace(kPlanned);
  for (int i = 0; i < 50; ++i) EXPECT_FALSE(pace.see(kPlanned));
  int steps = 0;
  while (steps < 100 &&
         !pace.see({.seconds = 3, .disk_seconds = 3, .wait_seconds = 2, .bytes = kPlanned.bytes}))
    ++steps;
  EXPECT_LT(steps, 2 * DiskPace::kWindow);
}

}  // namespace
}  // namespace lm
