// What a plan makes of an untied head whose weights or gradients leave the device.
#include <gtest/gtest.h>

#include <numeric>

#include "base/bytes.h"
#include "plan/plan.h"
#include "shapes.h"
#include "tests/support/oracles/schedule_fault.h"
#include "tests/support/oracles/transfer_fault.h"

namespace lm {
namespace {

constexpr int64_t kSegments = 16;  // of 128,256 rows

Case off_device(bool tied, Method method = Method::kFull) {
  Case c{.spec = llama_8b(), .machine = cpu_machine(256)};
  c.spec.tied = tied;
  c.config.train.method = method;
  c.config.offload.weights = c.config.offload.gradients = OffloadTier::kNvme;
  c.config.offload.paths = {"."};
  return c;
}

int64_t count(const PoolPlan& pool) {
  return std::count(pool.off_device.begin(), pool.off_device.end(), 1);
}

TEST(ChunkedHead, LeavesInSegmentsAndTheNormStays) {
  const Case c = off_device(false);
  const Plan plan = c.plan();
  const int64_t blocks = 34, segment = kVocabularySegment * 4096, rest = 128256 - 15 * kVocabularySegment;
  EXPECT_EQ(plan.placement.head_segments(), kSegments);
  for (const auto& [which, size] : {std::pair(Pool::kWeights, 2), std::pair(Pool::kGradients, 4)}) {
    const PoolPlan& pool = plan.placement.pool(which);
    ASSERT_EQ(std::ssize(pool.bytes), blocks + kSegments);
    EXPECT_EQ(count(pool), 32 + kSegments);
    EXPECT_EQ(pool.bytes[33], 0);  // the norm
    EXPECT_EQ(pool.bytes[34], segment * size);
    EXPECT_EQ(pool.bytes.back(), rest * 4096 * size);
    EXPECT_EQ(pool.slots, 3);
    EXPECT_EQ(pool.slot_bytes, pool.bytes[1]);  // a transformer block is longer
  }
  // Near: the embedding and the final norm.
  EXPECT_EQ(class_bytes(plan, "weights"), (128256LL * 4096 + 4096) * 2);
  EXPECT_EQ(class_bytes(plan, "gradients"), (128256LL * 4096 + 4096) * 4);
  EXPECT_EQ(plan.arena.logits, 512LL * kVocabularySegment * 2);
}

TEST(ChunkedHead, OfLoraLeavesFrozen) {
  const Plan plan = off_device(false, Method::kLora).plan();
  EXPECT_EQ(plan.placement.head_segments(), kSegments);
  EXPECT_EQ(plan.placement.pool(Pool::kWeights).bytes.back(),
            (128256LL - 15 * kVocabularySegment) * 4096 * 2);
  EXPECT_EQ(class_bytes(plan, "frozen weights"), (128256LL * 4096 + 4096) * 2);
  EXPECT_EQ(plan.placement.pool(Pool::kGradients).slots, 0);
}

TEST(ChunkedHead, IsWholeWhereItIsTiedOrNothingIsStreamed) {
  const auto expect_whole = [](const Plan& plan) {
    EXPECT_EQ(plan.placement.head_segments(), 0);
    for (const Pool pool : {Pool::kWeights, Pool::kGradients})
      EXPECT_EQ(std::ssize(plan.placement.pool(pool).bytes), 34);
    EXPECT_EQ(plan.placement.first_tile.size(), 35);
    EXPECT_TRUE(plan.placement.segment_tiles.empty());
    EXPECT_EQ(plan.step.units.size(), 34u);
    EXPECT_EQ(plan.step.units.back().role, UnitRole::kHead);
  };
  expect_whole(off_device(true).plan());
  Case resident = off_device(false);
  resident.config.offload.weights = resident.config.offload.gradients = OffloadTier::kNone;
  expect_whole(resident.plan());
  resident.config.offload.optimizer = OffloadTier::kNvme;
  expect_whole(resident.plan());
}

TEST(ChunkedHead, CutsTilesWhereSegmentsEnd) {
  for (const OffloadTier optimizer : {OffloadTier::kNone, OffloadTier::kNvme}) {
    Case c = off_device(false);
    c.config.offload.optimizer = optimizer;
    c.config.io.tile = ByteSize{24 * kMiB};
    const Plan plan = c.plan();
    const PlacementPlan& p = plan.placement;
    const std::vector<Unit> units = c.layout(nullptr).units(true);
    ASSERT_EQ(p.segment_tiles.size(), kSegments + 2);
    const int64_t first = p.first_tile[33], all = p.first_tile[34] - first;
    EXPECT_EQ(p.segment_tiles.front(), 0);
    EXPECT_EQ(p.segment_tiles.back(), all);
    EXPECT_EQ(optimizer == OffloadTier::kNone, all == kSegments + 1);
    for (int64_t s = 0; s <= kSegments; ++s) {
      const Unit& unit = units[static_cast<size_t>(s < kSegments ? 34 + s : 33)];
      const int64_t begin = first + p.segment_tiles[static_cast<size_t>(s)];
      EXPECT_EQ(p.first_granule[static_cast<size_t>(begin)] * kGranule, unit.first);
      int64_t bytes = 0;
      for (int64_t t = begin; t < first + p.segment_tiles[static_cast<size_t>(s) + 1]; ++t)
        bytes += p.pool(Pool::kOptimizer).bytes[static_cast<size_t>(t)];
      EXPECT_EQ(bytes, unit.elements * 10);
    }
  }
}

// Lists of the plan itself, over some steps.
TEST(ChunkedHead, GivesListsWithoutFault) {
  for (const Method method : {Method::kFull, Method::kLora}) {
    for (const OffloadTier optimizer : {OffloadTier::kNone, OffloadTier::kNvme}) {
      Case c = off_device(false, method);
      c.config.offload.optimizer = optimizer;
      const Plan plan = c.plan();
      SlotState state(plan.step);
      StepConfig shape = plan.step, next = plan.step;
      next.pending = shape.defers();
      for (int step = 0; step < 3; ++step) {
        const StepSchedule list = make_schedule(shape);
        ASSERT_EQ(schedule_fault(list, shape), "");
        const SlotState before = state;
        const StepSchedule moved = add_transfers(list, make_schedule(next), shape, state);
        ASSERT_EQ(transfer_fault(moved, shape, before), "");
        shape = next;
      }
    }
  }
}

TEST(ChunkedHead, SendsItsSegmentsAwayFirst) {
  Case c{.spec = llama_8b(), .machine = cpu_machine(0)};
  c.config.train.method = Method::kLora;
  c.config.offload.paths = {"."};
  int cut = 0, whole = 0, deep = 0;
  for (int64_t gib = 24; gib >= 6; --gib) {
    c.machine.host_memory = gib << 30;
    const Plan plan = c.draft();
    if (!plan.fits) break;
    const PoolPlan& pool = plan.placement.pool(Pool::kWeights);
    const int64_t segments = plan.placement.head_segments();
    ++(segments > 0 ? cut : whole);
    if (pool.slots == 0) continue;
    // What is off the device are the last arrays, and so segments first.
    bool gone = false;
    for (size_t a = 0; a < pool.bytes.size(); ++a) {
      if (pool.bytes[a] == 0) continue;
      EXPECT_TRUE(!gone || pool.off_device[a] != 0) << gib << " GiB, array " << a;
      gone = gone || pool.off_device[a] != 0;
    }
    EXPECT_EQ(pool.off_device.back(), 1);
    deep += pool.off_device[1] != 0;
  }
  EXPECT_GT(whole, 0);
  EXPECT_GT(cut, 0);
  EXPECT_GT(deep, 0);
}

TEST(ChunkedHead, TakesSlotsOfItsSegmentsLengthWhereNothingElseIsStreamed) {
  Case c{.spec = llama_8b(), .machine = cpu_machine(0)};
  c.config.train.method = Method::kLora;
  c.config.offload.paths = {"."};
  // Larger groups or saved activations would take the memory.
  c.config.train.global_batch = 1;
  c.config.train.recompute = Recompute::kBlock;
  const int64_t segment = kVocabularySegment * 4096 * 2;
  int found = 0;
  for (int64_t mib = 24 << 10; mib > 12 << 10; mib -= 64) {
    c.machine.host_memory = mib << 20;
    const Plan plan = c.draft();
    const PoolPlan& pool = plan.placement.pool(Pool::kWeights);
    if (!plan.fits || pool.slots == 0 || pool.off_device[32] != 0) continue;
    ++found;
    EXPECT_EQ(pool.slot_bytes, segment);
    // One more array would not fit on the device, even if it needed no slot then.
    const Tier& host = plan.tiers.front();
    EXPECT_GT(host.bytes + segment + 64 * kMiB, host.usable) << mib;
  }
  EXPECT_GT(found, 1);
}

TEST(ChunkedHead, CostsAFourthProductAndCrossesTwicePerGroup) {
  Case c = off_device(false, Method::kLora);
  c.config.train.recompute = Recompute::kBlock;
  c.config.train.micro_batch = 1;
  const Plan cut = c.plan();
  c.config.offload.weights = OffloadTier::kNone;
  const Plan whole = c.plan();
  const double rows = 8 * 2048.0, head = 128256.0 * 4096;
  EXPECT_NEAR(cut.estimate.cost.gemm_flops - whole.estimate.cost.gemm_flops, 2 * rows * head, 1e6);
  EXPECT_GT(cut.step_seconds, whole.step_seconds);
  // Blocks and head, forward and backward of the one group; what stays in slots at the turn and at the end is
  // not read again.
  const PoolPlan& pool = cut.placement.pool(Pool::kWeights);
  EXPECT_EQ(cut.placement.group, 8);
  const double once = static_cast<double>(std::accumulate(pool.bytes.begin(), pool.bytes.end(), int64_t{0}));
  EXPECT_LE(cut.timeline.disk_read_bytes, 2 * once);
  EXPECT_GE(cut.timeline.disk_read_bytes, 2 * once - 3.0 * static_cast<double>(pool.slots * pool.slot_bytes));
  EXPECT_EQ(cut.timeline.disk_written_bytes, 0);
}

}  // namespace
}  // namespace lm
