// A step's lanes: in order, as long as the step, all bytes of its links, and never too many boxes.
#include "plan/step_lanes.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "shapes.h"

namespace lm {
namespace {

std::vector<StepLane> lanes_of(const Case& c, const Plan& plan) {
  const ModelLayout layout = c.layout(nullptr);
  return step_lanes({c.config, c.spec, nullptr, layout, c.device}, c.machine, plan);
}

size_t count_spans(const std::vector<StepLane>& lanes) {
  size_t count = 0;
  for (const StepLane& lane : lanes) count += lane.spans.size();
  return count;
}

void expect_in_order(const std::vector<StepLane>& lanes) {
  for (const StepLane& lane : lanes) {
    double end = 0;
    for (const StepSpan& span : lane.spans) {
      EXPECT_GE(span.start, end - 1e-12) << lane.name << " " << span.name;
      EXPECT_GT(span.end, span.start) << lane.name << " " << span.name;
      end = span.end;
    }
  }
}

TEST(StepLanes, AreComputeAloneWhereEverythingIsInPlace) {
  Case c;
  c.spec.layers.resize(3);
  c.config.train.global_batch = 2;
  c.config.train.micro_batch = 2;
  const Plan plan = c.plan();
  const std::vector<StepLane> lanes = lanes_of(c, plan);
  ASSERT_EQ(lanes.size(), 1u);
  EXPECT_EQ(lanes[0].name, "compute");
  expect_in_order(lanes);
  const std::vector<StepSpan>& spans = lanes[0].spans;
  EXPECT_EQ(spans.front().start, 0);
  EXPECT_NEAR(spans.back().end, plan.step_seconds, 1e-9 * plan.step_seconds);
  const auto is = [](const char* name) { return [name](const StepSpan& span) { return span.name == name; }; };
  const auto forward = std::ranges::find_if(spans, is("forward block 2")),
             backward = std::ranges::find_if(spans, is("backward block 2"));
  ASSERT_TRUE(forward != spans.end() && backward != spans.end());
  EXPECT_LT(forward, backward);
  EXPECT_EQ(forward->kind, "forward");
}

TEST(StepLanes, HaveAllThatALinkMovesBesideCompute) {
  Case c{.spec = llama_1b(), .machine = gpu_machine("4090"), .device = DeviceType::kCuda};
  c.config.offload.optimizer = OffloadTier::kHost;
  c.machine.memory_bandwidth = 10e9;
  const Plan plan = c.plan();
  const LinkRates rates = link_rates(c.machine, c.device);
  std::vector<LaneSpan> spans;
  const auto free = [](const Operation&) { return 1e-3; };
  const Timeline timeline = walk_timeline(plan.step, plan.placement.timeline(), rates, free, &spans);
  double crossed = 0, last = 0;
  for (const LaneSpan& span : spans) {
    if (span.lane == Lane::kToDevice || span.lane == Lane::kFromDevice)
      crossed += (span.end - span.start) * rates.link;
    if (span.lane == Lane::kCompute) last = span.end;
  }
  EXPECT_GT(crossed, 0);
  EXPECT_NEAR(crossed, timeline.link_bytes, 1e-6 * timeline.link_bytes);
  EXPECT_NEAR(last, timeline.seconds, 1e-9);

  const std::vector<StepLane> lanes = lanes_of(c, plan);
  ASSERT_EQ(lanes.size(), 3u);
  EXPECT_EQ(lanes[1].name, "to the GPU");
  EXPECT_EQ(lanes[1].spans.front().kind, "optimizer");
  EXPECT_NE(lanes[1].spans.front().name.find("optimizer state of "), std::string::npos);
  EXPECT_LE(count_spans(lanes), kMostSpans);
  expect_in_order(lanes);
}

TEST(StepLanes, AreJoinedWhereThereAreTooManySpans) {
  Case c;
  c.config.train.global_batch = 64;
  c.config.train.micro_batch = 1;
  const Plan plan = c.plan();
  const std::vector<StepLane> lanes = lanes_of(c, plan);
  EXPECT_LE(count_spans(lanes), kMostSpans);
  EXPECT_GT(count_spans(lanes), kMostSpans / 2);
  expect_in_order(lanes);
  const std::vector<StepSpan>& spans = lanes[0].spans;
  EXPECT_EQ(spans.front().start, 0);
  EXPECT_NEAR(spans.back().end, plan.step_seconds, 1e-9 * plan.step_seconds);
  EXPECT_TRUE(spans.front().name.starts_with("forward embedding, micro-batch 0 ... ")) << spans.front().name;
  c.config.train.global_batch = 4096;
  EXPECT_TRUE(lanes_of(c, c.plan()).empty());
}

}  // namespace
}  // namespace lm
