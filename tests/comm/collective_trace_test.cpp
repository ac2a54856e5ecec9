// How far a GPU is among collectives, on a CPU, which does everything at once; with GPUs:
// nccl_group_test.cpp.
#include "comm/collective_trace.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

TEST(CollectiveTrace, CountsWhatIsDone) {
  SharedRegion region = SharedRegion::create(2);
  CollectiveTrace trace(DeviceType::kCpu, &region, 1);
  for (const char* const what : {"first", "second"}) {
    trace.begin(what, {});
    trace.end({});
  }
  EXPECT_EQ(region.peek(1).device.enqueued, 0U);  // nobody has looked
  EXPECT_FALSE(trace.waits());
  trace.look();
  EXPECT_EQ(region.peek(1).device.enqueued, 2U);
  EXPECT_EQ(region.peek(1).device.begun, 2U);
  EXPECT_EQ(region.peek(1).device.done, 2U);
  EXPECT_EQ(trace.stand().passed, 4U);
  EXPECT_EQ(trace.stand().where, "has completed all 2 collectives");
}

TEST(CollectiveTrace, SaysForWhomTheGpuWaits) {
  SharedRegion region = SharedRegion::create(3);
  CollectiveTrace trace(DeviceType::kCpu, &region, 1), alone(DeviceType::kCpu, nullptr, 1);
  for (CollectiveTrace* const each : {&trace, &alone}) {
    each->begin("gather", {});  // and NCCL has not taken it yet
    each->look();
    EXPECT_TRUE(each->waits());
    EXPECT_TRUE(each->stand().inside);
  }
  EXPECT_EQ(alone.stand().where, "waits in \"gather\" (collective 1) for other ranks");
  region.post_device(0, {.enqueued = 4, .begun = 1, .done = 0});
  EXPECT_EQ(trace.stand().where,
            "waits in \"gather\" (collective 1) for rank 2, whose GPU has completed 0 of 0 enqueued there");
  region.post_device(2, {.enqueued = 4, .begun = 1, .done = 1});
  EXPECT_FALSE(trace.waits());
  EXPECT_EQ(trace.stand().where,
            "has completed collective 0; its host is blocked enqueuing \"gather\" (collective 1)");
  trace.end({});
  EXPECT_EQ(trace.stand().where, "does not complete \"gather\" (collective 1), which all ranks have entered");
}

TEST(SharedRegion, TellsWhoEndsItFirst) {
  SharedRegion region = SharedRegion::create(2);
  EXPECT_TRUE(region.end());
  EXPECT_FALSE(region.end());
  EXPECT_TRUE(region.ended());
}

}  // namespace
}  // namespace lm
