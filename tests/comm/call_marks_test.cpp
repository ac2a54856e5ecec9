// What marks of calls say of ranks, by numbers alone; with GPUs: nccl_group_test.cpp.
#include "comm/call_marks.h"

#include <gtest/gtest.h>

#include <vector>

namespace lm {
namespace {

CallMark in_call(uint64_t call) {
  return {.enqueued = call + 3, .begun = call, .done = call - 1};
}
CallMark after_call(uint64_t call) {
  return {.enqueued = call + 3, .begun = call, .done = call};
}

TEST(Awaited, IsTheRankThatIsFurthestBehind) {
  const std::vector<CallMark> all{in_call(9), after_call(7), after_call(8), in_call(8)};
  EXPECT_EQ(awaited(all[0], all), 1);
  EXPECT_EQ(awaited(all[3], all), 1);  // though rank 2 has ended the call
}

TEST(Awaited, IsNobodyOfACallToWhichAllHaveCome) {
  const std::vector<CallMark> same{in_call(9), in_call(9)};
  EXPECT_EQ(awaited(same[0], same), std::nullopt);
  const std::vector<CallMark> others_have_done_it{in_call(9), after_call(9), in_call(10)};
  EXPECT_EQ(awaited(others_have_done_it[0], others_have_done_it), std::nullopt);
  EXPECT_EQ(awaited(others_have_done_it[2], others_have_done_it), 0);
}

TEST(Awaited, IsNobodyOfAGpuThatIsInNoCall) {
  const std::vector<CallMark> all{after_call(9), after_call(7)};
  EXPECT_EQ(awaited(all[0], all), std::nullopt);
}

// A CPU does everything at once.
TEST(CallMarks, CountWhatIsDone) {
  SharedRegion region = SharedRegion::create(2);
  CallMarks marks(DeviceType::kCpu, &region, 1);
  for (const char* const what : {"first", "second"}) {
    marks.begin(what, {});
    marks.end({});
  }
  EXPECT_EQ(region.calls(1).enqueued, 0U);  // nobody has looked
  EXPECT_FALSE(marks.waits());
  marks.look();
  EXPECT_EQ(region.calls(1).enqueued, 2U);
  EXPECT_EQ(region.calls(1).begun, 2U);
  EXPECT_EQ(region.calls(1).done, 2U);
  EXPECT_EQ(marks.stand().passed, 4U);
  EXPECT_EQ(marks.stand().where, "has done all 2 calls that were enqueued");
}

TEST(CallMarks, SayForWhomTheGpuWaits) {
  SharedRegion region = SharedRegion::create(3);
  CallMarks marks(DeviceType::kCpu, &region, 1), alone(DeviceType::kCpu, nullptr, 1);
  for (CallMarks* const each : {&marks, &alone}) {
    each->begin("gather", {});  // and NCCL has not taken it yet
    each->look();
    EXPECT_TRUE(each->waits());
    EXPECT_TRUE(each->stand().inside);
  }
  EXPECT_EQ(alone.stand().where, "waits in call 1, \"gather\", for others");
  region.mark_calls(0, {.enqueued = 4, .begun = 1, .done = 0});
  EXPECT_EQ(marks.stand().where,
            "waits in call 1, \"gather\", for rank 2, whose GPU has done 0 of 0 that were enqueued there");
  region.mark_calls(2, {.enqueued = 4, .begun = 1, .done = 1});
  EXPECT_FALSE(marks.waits());
  EXPECT_EQ(marks.stand().where,
            "has done call 0, and its host is held while it enqueues call 1, \"gather\"");
  marks.end({});
  EXPECT_EQ(marks.stand().where, "does not end call 1, \"gather\", to which all have come");
}

TEST(SharedRegion, TellsWhoEndsItFirst) {
  SharedRegion region = SharedRegion::create(2);
  EXPECT_TRUE(region.end());
  EXPECT_FALSE(region.end());
  EXPECT_TRUE(region.ended());
}

}  // namespace
}  // namespace lm
