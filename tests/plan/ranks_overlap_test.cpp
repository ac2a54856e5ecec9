// Ranks with GPUs exchange beside compute: what the estimate makes of it, against a walk of its own and at
// both ends.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "plan/estimate.h"
#include "plan/traffic.h"
#include "shapes.h"

namespace lm {
namespace {

Case gpus(int64_t stage, int ranks, double peer_bandwidth) {
  Case c{.spec = llama_1b(), .machine = gpu_machine("H100"), .device = DeviceType::kCuda};
  stay_near(c.config);
  c.config.zero.stage = stage;
  c.config.train.global_batch = 4 * ranks;
  c.config.train.micro_batch = 4;
  c.machine.gpus.front().peer_bandwidth = peer_bandwidth;
  c.world.ranks = ranks;
  return c;
}

// Of a step without its calls, and of its calls.
struct Parts {
  double compute = 0, calls = 0;
};

Parts parts(const Case& c, const Plan& plan) {
  const ModelLayout layout = c.layout(nullptr);
  const PlanInputs inputs{c.config, c.spec, nullptr, layout, c.device, {}, {}, nullptr};
  const PlanInput in{inputs, c.machine, c.world, PlanPurpose::kTrain};
  const StepCosts costs(step_shape(in, plan));
  Parts out{.compute = 0, .calls = plan.traffic.seconds};
  const auto compute = compute_seconds(in, plan, costs);
  for (const Operation& op : make_schedule(plan.step).operations) out.compute += compute(op);
  return out;
}

TEST(RanksOverlap, AFastLinkHidesUnderComputeAndComputeUnderASlowOne) {
  for (const int64_t stage : {0, 1, 2, 3}) {
    const Case fast = gpus(stage, 4, 1e15), slow = gpus(stage, 4, 2e9);
    const Plan quick = fast.draft(), held_up = slow.draft();
    const Parts all = parts(fast, quick), late = parts(slow, held_up);
    EXPECT_LE(quick.step_seconds, 1.01 * (all.compute + all.calls)) << stage;
    EXPECT_GE(quick.step_seconds, 0.9 * all.compute) << stage;
    ASSERT_GT(late.calls, 4 * late.compute) << stage;
    EXPECT_GE(held_up.step_seconds, late.calls) << stage;
    EXPECT_LE(held_up.step_seconds, late.calls + 0.75 * late.compute) << stage;
  }
}

TEST(RanksOverlap, AStepIsShorterThanItsPartsAndNotThanEither) {
  for (const int64_t stage : {0, 1, 2, 3}) {
    for (const double rate : {30e9, 100e9, 300e9}) {
      const Case c = gpus(stage, 4, rate);
      const Plan plan = c.draft();
      const Parts all = parts(c, plan);
      // What cannot be hidden is what the last backward's block leaves, and the updates.
      EXPECT_LT(plan.step_seconds, all.compute + 0.9 * all.calls) << stage << " at " << rate;
      EXPECT_GE(plan.step_seconds, all.calls) << stage << " at " << rate;
      EXPECT_GE(plan.step_seconds, 0.9 * all.compute) << stage << " at " << rate;
    }
  }
}

// The same list with two clocks and nothing else: compute's, and that of what the ranks do together.
double two_clocks(const Case& c, const Plan& plan) {
  const ModelLayout layout = c.layout(nullptr);
  const PlanInputs inputs{c.config, c.spec, nullptr, layout, c.device, {}, {}, nullptr};
  const PlanInput in{inputs, c.machine, c.world, PlanPurpose::kTrain};
  const StepCosts costs(step_shape(in, plan));
  const auto compute = compute_seconds(in, plan, costs);
  const Traffic traffic(in.layout, plan.numerics, plan.placement, c.world);
  const RankLinks links = rank_links(c.machine, c.device);
  double now = 0, link = 0, before = 0;
  std::map<int64_t, double> weights;  // when a unit's are whole
  const std::vector<Operation> operations = make_schedule(plan.step).operations;
  for (int step = 0; step < 3; ++step) {
    before = now;
    for (const Operation& op : operations) {
      double seconds = compute(op);
      for (const Collective& call : traffic.of(op))
        seconds += collective_time(call, c.world, links).seconds();
      const bool shared = op.kind == OperationKind::kReduceScatter || op.kind == OperationKind::kNorm ||
                          op.kind == OperationKind::kGather;
      if (shared) {
        link = std::max(link, now) + seconds;
        if (op.kind == OperationKind::kGather) weights[op.unit] = link;
      } else {
        const bool uses = op.kind == OperationKind::kForward || op.kind == OperationKind::kHead ||
                          op.kind == OperationKind::kRecompute || op.kind == OperationKind::kBackward;
        if (uses) now = std::max(now, weights[op.unit]);
        if (op.kind == OperationKind::kCheck) now = std::max(now, link);
        now += seconds;
      }
    }
  }
  return now - before + collective_time(traffic.stop_vote().front(), c.world, links).seconds();
}

TEST(RanksOverlap, TheEstimateIsThatOfTwoClocks) {
  for (const int64_t stage : {0, 1}) {  // later ones have slots, which calls hold
    for (const double rate : {3e9, 30e9, 300e9}) {
      const Case c = gpus(stage, 4, rate);
      const Plan plan = c.draft();
      const double wanted = two_clocks(c, plan);
      EXPECT_NEAR(plan.step_seconds, wanted, 1e-9 * wanted) << stage << " at " << rate;
    }
  }
}

// Of LoRA the base alone passes through slots: adapters are gathered beside the updates of the next ones.
TEST(RanksOverlap, AdaptersOverABaseInShardsAreGatheredBesideUpdates) {
  Case c = gpus(3, 4, 30e9);
  c.config.train.method = Method::kLora;
  const Plan plan = c.draft();
  ASSERT_GT(plan.placement.pool(Pool::kWeights).slots, 0);
  double updates = 0;
  const auto seconds = [](const Operation& op) {
    return op.kind == OperationKind::kUpdate || op.kind == OperationKind::kGather ? 1.0 : 0.0;
  };
  for (const Operation& op : make_schedule(plan.step).operations)
    updates += op.kind == OperationKind::kUpdate ? seconds(op) : 0;
  ASSERT_GT(updates, 10);
  const Timeline timeline = walk_timeline(plan.step, plan.placement.timeline(), {.link = 1}, seconds);
  EXPECT_LE(timeline.seconds, updates + 2);
}

}  // namespace
}  // namespace lm
