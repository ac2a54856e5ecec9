// What decides that a rank is gone, late or stuck, by numbers alone: the clock is the test's.
#include "comm/liveness.h"

#include <gtest/gtest.h>

#include <vector>

namespace lm {
namespace {

constexpr double kLook = 0.25;

std::string text(const std::optional<Error>& error) {
  return error ? std::to_string(static_cast<int>(error->code())) + " " + error->what() : "";
}

Posted posted(uint64_t heartbeats) {
  return {.heartbeats = heartbeats, .last = {"first", 1}, .host = "node"};
}

TEST(Liveness, NamesARankWithoutAHeartbeat) {
  Liveness liveness({2, "here"}, 3, {.silence = 3, .late = 100}, 10);
  liveness.enter({"second", 2}, 10);
  double now = 10;
  for (uint64_t beats = 1; beats < 20; ++beats) {  // rank 1 lives on
    now += kLook;
    EXPECT_EQ(text(liveness.silent(0, posted(1), now)).empty(), now < 13.25) << now;
    EXPECT_EQ(text(liveness.silent(1, posted(beats), now)), "");
  }
  EXPECT_EQ(
      text(liveness.silent(0, posted(1), now)),
      "41 no heartbeat from rank 0 on node for 4.5 s: it was last in \"first\" (collective 1) at rank 2 on "
      "here, in \"second\" (collective 2)");
  EXPECT_EQ(text(liveness.silent(0, posted(2), now)), "");
}

TEST(Liveness, NamesARankThatLivesAndDoesNotCome) {
  Liveness liveness({0}, 2, {.silence = 3, .late = 2}, 0);
  liveness.enter({"save", 7}, 0);
  EXPECT_EQ(text(liveness.late(1, 1)), "");
  EXPECT_EQ(text(liveness.late(1, 2)),
            "41 rank 1 did not enter \"save\" (collective 7) within 2.0 s at rank 0");
  liveness.enter({"step", 8}, 2);
  EXPECT_EQ(text(liveness.late(1, 3)), "");
}

// However long it was stopped: of the time between two looks little counts, for either.
TEST(Liveness, WhoWasStoppedItselfGivesNobodyUp) {
  Liveness liveness({0}, 2, {.silence = 3, .late = 3}, 0);
  liveness.enter({"step", 1}, 0);
  EXPECT_EQ(text(liveness.silent(1, posted(1), kLook)), "");
  EXPECT_EQ(text(liveness.silent(1, posted(1), 3600)), "");
  EXPECT_EQ(text(liveness.late(1, 3600)), "");
}

TEST(StallTimer, CountsWhatACounterStandsStill) {
  StallTimer timer(0, 0.5);
  EXPECT_DOUBLE_EQ(timer.look(0, 0.25), 0.25);
  EXPECT_DOUBLE_EQ(timer.look(0, 10), 0.75);
  EXPECT_DOUBLE_EQ(timer.look(1, 11), 0);
  EXPECT_DOUBLE_EQ(timer.look(1, 11.25), 0.25);
  timer.restart(12);
  EXPECT_DOUBLE_EQ(timer.look(1, 12.25), 0.25);
}

TEST(Liveness, WordsOfARankThatIsStuckAndOfOneThatHasEnded) {
  EXPECT_EQ(
      text(no_progress({2, "node7"}, "\"forward\" of step 7", 61, 60, "is busy")),
      "41 rank 2 on node7 has made no progress for 61.0 s: it is stuck in \"forward\" of step 7, with 60.0 s "
      "allowed; its GPU is busy at rank 2");
  EXPECT_EQ(text(peer_ended({1}, "during \"save\"")), "40 another rank has ended during \"save\" at rank 1");
  EXPECT_EQ(text(peer_ended({-1, "node"}, "")), "40 another rank has ended at node");
}

DeviceProgress inside(uint64_t collective) {
  return {.enqueued = collective + 3, .begun = collective, .done = collective - 1};
}
DeviceProgress behind(uint64_t collective) {
  return {.enqueued = collective + 3, .begun = collective, .done = collective};
}

TEST(Awaited, IsTheRankThatIsFurthestBehind) {
  const std::vector<DeviceProgress> all{inside(9), behind(7), behind(8), inside(8)};
  EXPECT_EQ(awaited(all[0], all), 1);
  EXPECT_EQ(awaited(all[3], all), 1);  // though rank 2 has completed that collective
}

TEST(Awaited, IsNobodyOfACollectiveThatAllHaveEntered) {
  const std::vector<DeviceProgress> same{inside(9), inside(9)};
  EXPECT_EQ(awaited(same[0], same), std::nullopt);
  const std::vector<DeviceProgress> others_have_done_it{inside(9), behind(9), inside(10)};
  EXPECT_EQ(awaited(others_have_done_it[0], others_have_done_it), std::nullopt);
  EXPECT_EQ(awaited(others_have_done_it[2], others_have_done_it), 0);
}

TEST(Awaited, IsNobodyOfAGpuThatIsInNoCollective) {
  const std::vector<DeviceProgress> all{behind(9), behind(7)};
  EXPECT_EQ(awaited(all[0], all), std::nullopt);
}

}  // namespace
}  // namespace lm
