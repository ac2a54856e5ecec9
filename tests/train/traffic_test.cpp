// What ranks send to one another in a step, counted where it leaves, against what the plan says of it.
#include "plan/traffic.h"

#include <gtest/gtest.h>

#include <thread>

#include "comm/shared_group.h"
#include "offloaded_run.h"
#include "tests/support/oracles/collective_bytes.h"

namespace lm {
namespace {

using namespace offloaded_run;

// Of a rank in the last of some steps.
struct Sent {
  int64_t counted = 0, listed = 0;
  int64_t between = 0;  // counted, to other machines
  double planned = 0, planned_between = 0;
};

Sent last_step(const Variant& run, Group& group) {
  Training training(run, {}, {}, &group);
  constexpr int64_t kSteps = 4;
  for (int64_t s = 1; s < kSteps; ++s) training.step(s);
  const int64_t before = group.sent_bytes(), before_between = group.sent_between_machines();
  training.step(kSteps);
  Sent out{.counted = group.sent_bytes() - before, .between = group.sent_between_machines() - before_between};

  const Plan& plan = training.plan();
  const Traffic traffic(training.layout(), plan.numerics, plan.placement, plan.world);
  const StepSchedule step = steady_steps(plan.step).back();
  for (const Operation& op : step.operations) {
    for (const Collective& call : traffic.of(op)) out.listed += sent_by(call, group.rank(), group.ranks());
  }
  out.planned = plan.traffic.bytes();
  out.planned_between = out.planned * plan.traffic.between_share;
  return out;
}

std::vector<Sent> sent_by_all(const Variant& run, int ranks) {
  SharedRegion region = SharedRegion::create(ranks);
  std::vector<Sent> out(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      try {
        SharedGroup group(region, r);
        if (run.nodes > 1) group.set_machines(ranks / run.nodes);
        out[static_cast<size_t>(r)] = last_step(run, group);
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << r << ": " << error.what();
        region.end();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return out;
}

// Byte for byte on each rank; and the plan's mean of all of them, which has the vote of whether to stop, too.
TEST(Traffic, IsThePlansForEveryStage) {
  for (const int ranks : {2, 3, 4}) {
    for (const int64_t stage : {0, 1, 2, 3}) {
      for (int which = 0; which < 8; ++which) {
        Variant run;
        run.stage = stage;
        run.lora = which % 2 == 1;
        run.recompute = which >= 2;
        run.micro_batches = ranks * (which >= 4 ? 2 : 1);
        run.group = run.recompute && stage >= 2 && !run.lora ? 2 : 1;  // as planned
        run.in_backward = which >= 6;  // 7: the gradients of LoRA twice, for their norm
        run.clip = which == 6 ? Clip::kBlock : Clip::kGlobal;
        if (which == 0) run.tied = false, run.vocab = 17000;  // a head in segments where it is sharded
        double counted = 0;
        const std::vector<Sent> all = sent_by_all(run, ranks);
        for (const Sent& sent : all) {
          EXPECT_EQ(sent.counted, sent.listed) << ranks << " ranks, stage " << stage << " " << run.text();
          EXPECT_GT(sent.counted, 0);
          counted += static_cast<double>(sent.counted);
        }
        EXPECT_NEAR(all.front().planned * ranks / counted, 1, 0.01)
            << ranks << " ranks, stage " << stage << " " << run.text();
      }
    }
  }
}

// Sums cross between machines once for each of these, in fp32, and so does what is shared.
TEST(Traffic, IsThePlansForSeveralMachines) {
  for (const int nodes : {2, 3, 6}) {
    for (const DType gradients : {DType::kF32, DType::kBF16}) {
      for (const int64_t stage : {0, 1, 3}) {
        Variant run;
        run.stage = stage, run.nodes = nodes;
        run.gradient_dtype = gradients;
        run.micro_batches = 6;
        run.steps = 4;
        double counted = 0, between = 0;
        const std::vector<Sent> all = sent_by_all(run, 6);
        for (const Sent& sent : all) {
          EXPECT_EQ(sent.counted, sent.listed) << nodes << " machines, stage " << stage;
          counted += static_cast<double>(sent.counted);
          between += static_cast<double>(sent.between);
        }
        EXPECT_NEAR(all.front().planned * 6 / counted, 1, 0.01) << nodes << " machines, stage " << stage;
        EXPECT_NEAR(all.front().planned_between * 6 / between, 1, 0.01)
            << nodes << " machines, stage " << stage;
      }
    }
  }
}

TEST(Traffic, OfOneRankIsNothing) {
  LocalGroup group;
  const Sent sent = last_step({.stage = 3}, group);
  EXPECT_EQ(sent.counted + sent.listed, 0);
  EXPECT_EQ(sent.planned, 0);
}

}  // namespace
}  // namespace lm
