#include "launcher/cli/first_cause.h"

#include <gtest/gtest.h>

#include <csignal>
#include <vector>

#include "base/error.h"

namespace lm {
namespace {

// As waitpid gives them.
constexpr int exited(int code) {
  return code << 8;
}
constexpr int kKilled = SIGKILL, kDone = exited(0), kStopped = exited(static_cast<int>(Exit::kStopped)),
              kPeerLost = exited(static_cast<int>(Exit::kPeerLost)), kHung = exited(41);

struct Gone {
  int rank, wait_status;
  bool killed = false;
  int reported = -1;
};

void expect_cause(const std::vector<Gone>& gone, int rank, int wait_status) {
  FirstCause cause;
  for (const Gone& each : gone) cause.take(each.rank, each.wait_status, each.killed, each.reported);
  EXPECT_EQ(cause.rank(), rank);
  EXPECT_EQ(cause.wait_status(), wait_status);
}

TEST(FirstCause, IsTheFirstRankThatEndedByItself) {
  expect_cause({{1, kDone}, {0, kDone}}, 0, kDone);
  expect_cause({{1, kStopped}, {0, kStopped}}, 0, kStopped);
  expect_cause({{2, kHung}, {0, kPeerLost}, {1, exited(50)}}, 2, kHung);
  expect_cause({{0, kPeerLost}, {1, kPeerLost}, {2, kKilled}}, 2, kKilled);
  expect_cause({{1, kDone}, {2, kPeerLost}, {0, kDone}}, 2, kPeerLost);
}

// Rank 0 has reported that rank 1 hangs, and neither ended: the kernel decides who is gone first.
TEST(FirstCause, IsRankZeroWhereAllWereKilledHere) {
  expect_cause({{1, kKilled, true}, {0, kKilled, true}}, 0, kKilled);
  expect_cause({{0, kKilled, true}, {1, kKilled, true}}, 0, kKilled);
  expect_cause({{1, kDone}, {0, kKilled, true}}, 0, kKilled);
  // What was known before remains.
  expect_cause({{1, kHung}, {2, kKilled, true}, {0, kKilled, true}}, 1, kHung);
  expect_cause({{1, kKilled}, {0, kKilled, true}}, 1, kKilled);
}

// Rank 0 hangs after another rank's end: who was killed for that has caused nothing.
TEST(FirstCause, IsNoRankThatWasKilledHereWhereAnotherFailedByItself) {
  expect_cause({{1, kPeerLost}, {0, kKilled, true}}, 1, kPeerLost);
  expect_cause({{1, kPeerLost}, {2, kKilled, true}, {0, kKilled, true}}, 1, kPeerLost);
  expect_cause({{1, kKilled, true}, {0, kHung, true}}, 0, kHung);
  expect_cause({{0, kKilled, true}, {1, kPeerLost, true}}, 1, kPeerLost);
  expect_cause({{1, kPeerLost}, {0, SIGSEGV, true}}, 0, SIGSEGV);  // which the CLI does not send
  // What rank 0 has reported counts as its end.
  expect_cause({{1, kPeerLost}, {0, kKilled, true, 41}}, 0, kKilled);
  expect_cause({{1, kPeerLost}, {0, kKilled, true, 0}}, 1, kPeerLost);
  expect_cause({{1, kHung}, {0, kKilled, true, 40}}, 1, kHung);
}

TEST(FirstCause, KnowsARankThatWasKilledWithoutAWord) {
  FirstCause cause;
  cause.take(1, kPeerLost, false);
  EXPECT_EQ(cause.killed_here(), -1);
  cause.take(0, kKilled, true, 41);
  EXPECT_EQ(cause.killed_here(), -1);
  cause.take(3, kKilled, true);
  cause.take(2, kKilled, true);
  EXPECT_EQ(cause.killed_here(), 3);
}

TEST(FirstCause, DoneAndStoppedEndWell) {
  EXPECT_TRUE(ends_well(kDone) && ends_well(kStopped));
  EXPECT_FALSE(ends_well(kPeerLost) || ends_well(kHung) || ends_well(kKilled));
}

}  // namespace
}  // namespace lm
