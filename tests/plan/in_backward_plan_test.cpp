// Updates inside backward, planned: what they save and cost, and when `train.update = "auto"` chooses them.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/bytes.h"
#include "plan/alternatives.h"
#include "shapes.h"

namespace lm {
namespace {

Case llama_case(Clip clip, UpdateTime update) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(64)};
  c.config.optimizer.clip = clip;
  c.config.train.update = update;
  c.config.train.micro_batch = 2;
  c.config.train.recompute = Recompute::kBlock;
  return c;
}

int64_t longest_block(const ModelLayout& layout, size_t first) {
  int64_t out = 0;
  for (size_t b = first; b < layout.blocks.size(); ++b) out = std::max(out, layout.blocks[b].flat_elements);
  return out;
}

// Too small for the gradients of all blocks, and large enough for one.
Machine short_machine() {
  const int64_t after = llama_case(Clip::kBlock, UpdateTime::kAfter).plan().peak.host;
  const int64_t inside = llama_case(Clip::kBlock, UpdateTime::kInBackward).plan().peak.host;
  Machine machine = cpu_machine(64);
  machine.host_limit = static_cast<int64_t>(static_cast<double>(after + inside) / 2 / 0.9);
  return machine;
}

TEST(InBackwardPlan, CountsTheGradientOfOneBlock) {
  Case c = llama_case(Clip::kBlock, UpdateTime::kInBackward);
  const ModelLayout tied = c.layout(nullptr);
  EXPECT_EQ(class_bytes(c.plan(), "gradients"),
            (tied.blocks.front().flat_elements + longest_block(tied, 1)) * 4);
  c.spec.tied = false;
  const ModelLayout untied = c.layout(nullptr);
  EXPECT_EQ(class_bytes(c.plan(), "gradients"), longest_block(untied, 0) * 4);
  c.config.train.gradients = GradientDType::kBF16;
  EXPECT_EQ(class_bytes(c.plan(), "gradients"), longest_block(untied, 0) * 2);
  c.config.train.update = UpdateTime::kAfter;
  EXPECT_EQ(class_bytes(c.plan(), "gradients"), untied.flat_elements * 2);
}

TEST(InBackwardPlan, LetsAllMicroBatchesPassABlockTogether) {
  for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
    Case c = llama_case(Clip::kBlock, UpdateTime::kInBackward);
    c.config.train.recompute = recompute;
    c.machine = cpu_machine(512);
    const Plan plan = c.plan();
    EXPECT_EQ(plan.numerics.micro_batches, 4);
    EXPECT_EQ(plan.placement.group, 4);
    EXPECT_TRUE(plan.step.in_backward);
    c.config.train.update = UpdateTime::kAfter;
    const Plan after = c.plan();
    EXPECT_EQ(after.placement.group, 1);
    EXPECT_GT(class_bytes(plan, "activations"), 3 * class_bytes(after, "activations"));
    EXPECT_TRUE(plan.numerics == after.numerics);
  }
}

TEST(InBackwardPlan, CostsASecondBackwardUnderGlobalClippingAlone) {
  for (const Clip clip : {Clip::kGlobal, Clip::kBlock, Clip::kNone}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kBlock}) {
      Case c = llama_case(clip, UpdateTime::kInBackward);
      c.config.train.recompute = recompute;
      c.machine = cpu_machine(512);
      const Plan plan = c.plan();
      c.config.train.update = UpdateTime::kAfter;
      const Plan after = c.plan();
      const auto said = std::ranges::find(plan.choices, "backward for the norm", &Choice::key);
      EXPECT_EQ(said != plan.choices.end(), clip == Clip::kGlobal);
      if (clip != Clip::kGlobal) {
        EXPECT_NEAR(plan.step_seconds, after.step_seconds, 1e-9 * after.step_seconds);
        continue;
      }
      const double more = plan.step_seconds - after.step_seconds;
      EXPECT_NEAR(std::stod(said->value), more, 0.01 * more);
      // Recomputed, forward : backward = 2 : 2 and one more pair of recomputation and backward; else all of
      // it once more.
      EXPECT_NEAR(plan.step_seconds / after.step_seconds, recompute == Recompute::kNone ? 2 : 1.75, 0.1);
    }
  }
}

// From a machine on which everything fits down to one on which nothing does.
TEST(InBackwardPlan, IsWhatAutoTakesWhereTheGradientsDoNotFit) {
  for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
    int after = 0, inside = 0;
    bool fitted = true;
    for (int64_t gib = 40; gib >= 8; --gib) {
      Case c = llama_case(clip, UpdateTime::kAuto);
      c.machine = cpu_machine(gib);
      const Plan plan = c.draft();
      const bool in_backward = plan.placement.in_backward();
      Case other = c;
      other.config.train.update = UpdateTime::kAfter;
      EXPECT_EQ(other.draft().fits, plan.fits && !in_backward) << gib;
      other.config.train.update = UpdateTime::kInBackward;
      EXPECT_EQ(other.draft().fits, plan.fits) << gib;
      const auto said = std::ranges::find(plan.choices, "train.update", &Choice::key);
      EXPECT_EQ(said != plan.choices.end(), in_backward) << gib;
      EXPECT_TRUE(fitted || !plan.fits) << gib;
      fitted = plan.fits;
      after += plan.fits && !in_backward, inside += plan.fits && in_backward;
    }
    EXPECT_GE(after, 3);
    EXPECT_GE(inside, 3);
  }
}

// It costs nothing without a global norm, and so comes before anything leaves the device; a second backward
// is the last resort.
TEST(InBackwardPlan, ComesBeforeTheDiskWhereItIsFree) {
  for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
    Case c = llama_case(clip, UpdateTime::kAuto);
    c.machine = short_machine();
    c.machine.disks = {{"/disk", 1LL << 40, 3e9, 2e9}};
    c.config.offload.paths = {"/disk"};
    const Plan plan = c.plan();
    EXPECT_EQ(plan.placement.in_backward(), clip == Clip::kBlock);
    EXPECT_EQ(plan.placement.on_disk(), clip == Clip::kGlobal);
    c.config.offload.gradients = OffloadTier::kNvme;
    EXPECT_FALSE(c.plan().placement.in_backward());
  }
}

// With `bytes` less than the plan needs as it is.
Plan with_less(Case c, int64_t bytes) {
  c.machine.host_limit = static_cast<int64_t>(static_cast<double>(c.plan().peak.host - bytes) / 0.9);
  return c.draft();
}

TEST(InBackwardPlan, MakesATiedTablesGradientLastWhereItDoesNotFitBesideActivations) {
  for (const Clip clip : {Clip::kBlock, Clip::kNone}) {
    for (const Recompute recompute : {Recompute::kBlock, Recompute::kNone}) {
      Case c = llama_case(clip, UpdateTime::kInBackward);
      c.config.train.recompute = recompute;
      c.machine = cpu_machine(512);
      const Plan first = c.plan(), last = with_less(c, 64 * kMiB);
      EXPECT_FALSE(first.placement.defer_tied_gradient);
      ASSERT_TRUE(last.fits);
      EXPECT_TRUE(last.placement.defer_tied_gradient);
      EXPECT_TRUE(last.step.defer_tied_gradient);
      EXPECT_TRUE(last.numerics == first.numerics);
      const auto said = std::ranges::find(last.choices, "gradient of the tied table", &Choice::key);
      EXPECT_NE(said, last.choices.end());
      // One of the two is there at a time: blocks' gradients with activations, or the table's.
      const int64_t slot = class_bytes(last, "gradients"), table = class_bytes(first, "gradients") - slot;
      EXPECT_EQ(slot, longest_block(c.layout(nullptr), 1) * 4);
      const int64_t kept = last.arena.bytes - std::max(table, first.arena.bytes + slot);
      EXPECT_GE(kept, 16384 * 2048 * 2 / 4);  // a quarter of the tokens have no target at most
      EXPECT_LT(kept, 128 * kMiB);
      EXPECT_GE(first.peak.host - last.peak.host, std::min(table, first.arena.bytes + slot) - 2 * kept);
      // A fourth product of the head's three.
      const double product = 2.0 * 128256 * 2048 * last.step_tokens / 350e9;
      EXPECT_NEAR(last.step_seconds - first.step_seconds, product, 0.5 * product);
    }
  }
}

TEST(InBackwardPlan, MakesNothingLastButATiedTableOfAStepWithOneBackward) {
  Case global = llama_case(Clip::kGlobal, UpdateTime::kInBackward);
  Case untied = llama_case(Clip::kBlock, UpdateTime::kInBackward);
  untied.spec.tied = false;
  Case after = llama_case(Clip::kBlock, UpdateTime::kAfter);
  for (const Case& c : {global, untied, after}) {
    const Plan plan = with_less(c, 64 * kMiB);
    EXPECT_FALSE(plan.placement.defer_tied_gradient);
    EXPECT_FALSE(plan.fits);
  }
}

// It takes less of a step than a disk does; where only both fit, both are taken.
TEST(InBackwardPlan, MakesATableLastBeforeTheDiskAndBesideIt) {
  Case c = llama_case(Clip::kBlock, UpdateTime::kInBackward);
  c.machine.disks = {{"/disk", 1LL << 40, 3e9, 2e9}};
  c.config.offload.paths = {"/disk"};
  const Plan near = with_less(c, 64 * kMiB);
  EXPECT_TRUE(near.fits && near.placement.defer_tied_gradient && !near.placement.on_disk());
  const Plan disk = with_less(c, 2048 * kMiB);
  EXPECT_TRUE(disk.fits && !disk.placement.defer_tied_gradient && disk.placement.on_disk());
  bool both = false;
  for (int64_t mib = 2048; mib < 16384 && !both; mib += 256) {
    const Plan plan = with_less(c, mib * kMiB);
    both = plan.fits && plan.placement.defer_tied_gradient && plan.placement.on_disk();
  }
  EXPECT_TRUE(both);
}

// What it saves is not spent on numerics: these are as under global clipping, which does without it.
TEST(InBackwardPlan, DoesNotDecideNumericsByATableMadeLast) {
  int last = 0;
  for (int64_t mib = 8192; mib <= 24576; mib += 128) {
    Plan plans[2];
    for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
      Case c = llama_case(clip, UpdateTime::kInBackward);
      c.config.train.recompute = Recompute::kAuto;
      c.config.offload.activations = OffloadTier::kNone;  // on the disk they leave room enough
      c.machine.host_memory = mib * kMiB;
      c.machine.disks = {{"/disk", 1LL << 40, 3e9, 2e9}};
      c.config.offload.paths = {"/disk"};
      plans[clip == Clip::kBlock] = c.draft();
    }
    if (!plans[0].fits) continue;
    EXPECT_TRUE(plans[1].fits) << mib;
    EXPECT_TRUE(plans[1].numerics == plans[0].numerics) << mib << " MiB";
    last += plans[1].placement.defer_tied_gradient;
  }
  EXPECT_GE(last, 2);
}

// Its batches are placed a second time.
TEST(InBackwardPlan, SendsBatchesTwiceToAGpuThatMakesATableLast) {
  Case c = llama_case(Clip::kBlock, UpdateTime::kInBackward);
  c.machine = gpu_machine("H200");
  c.device = DeviceType::kCuda;
  stay_near(c.config);
  const Plan first = c.plan();
  c.config.offload.device_memory = {.bytes = first.peak.device - 64 * kMiB};
  const Plan last = c.plan();
  EXPECT_TRUE(last.placement.defer_tied_gradient);
  EXPECT_EQ(last.upload_bytes, 2 * first.upload_bytes);
}

TEST(InBackwardPlan, LeavesAdaptersAsTheyAre) {
  Case c{.machine = cpu_machine(1)};
  c.config.train.method = Method::kLora;
  EXPECT_FALSE(c.draft().placement.in_backward());
  c.config.train.update = UpdateTime::kInBackward;
  EXPECT_TRUE(c.draft().placement.in_backward());
}

TEST(InBackwardPlan, NeverDecidesTheMicroBatch) {
  for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
    for (int64_t gib = 12; gib <= 40; ++gib) {
      Case c = llama_case(clip, UpdateTime::kAuto);
      // Sizes of which the machine has room for some.
      c.config.train.micro_batch = {}, c.config.train.recompute = Recompute::kNone;
      c.config.train.global_batch = 16, c.config.data.max_length = 128;
      c.machine = cpu_machine(gib);
      const NumericsPlan want = c.draft().numerics;
      for (const UpdateTime update : {UpdateTime::kAfter, UpdateTime::kInBackward}) {
        c.config.train.update = update;
        const Plan plan = c.draft();
        if (plan.fits) {
          EXPECT_EQ(plan.numerics.micro_batch, want.micro_batch) << gib;
        }
      }
    }
  }
}

TEST(InBackwardPlan, IsARowOfTheComparison) {
  Case c = llama_case(Clip::kBlock, UpdateTime::kAuto);
  const ModelLayout layout = c.layout(nullptr);
  const auto rows = [&] {
    return alternatives({c.config, c.spec, nullptr, layout, c.device}, c.machine, {});
  };
  const auto has = [](const std::vector<Alternative>& all, const std::vector<std::string>& settings) {
    return std::ranges::find(all, settings, &Alternative::settings) != all.end();
  };
  EXPECT_TRUE(has(rows(), {"train.update=in_backward"}));
  EXPECT_TRUE(has(rows(), {"optimizer.master=none", "optimizer.name=sgd", "train.update=in_backward"}));
  c.machine = short_machine();  // "auto" is that already
  EXPECT_FALSE(has(rows(), {"train.update=in_backward"}));
  c.config.train.update = UpdateTime::kInBackward;
  EXPECT_TRUE(has(rows(), {"train.update=after"}));
}

}  // namespace
}  // namespace lm
