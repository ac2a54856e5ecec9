#include "plan/recompute_level.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "base/bytes.h"
#include "config/config_names.h"
#include "plan/estimate.h"
#include "shapes.h"

namespace lm {
namespace {

// Machines on which more and more fits, with and without a disk, and micro-batches that share loans.
std::vector<Case> machines() {
  std::vector<Case> out;
  for (int64_t bytes = 16LL << 30; bytes < 48LL << 30; bytes += 5LL << 28) {
    Case gpu{.spec = llama_1b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
    gpu.machine.gpus[0].memory_bytes = bytes;
    // Of long sequences attention is most of the work.
    if (out.size() % 3 > 0) gpu.config.data.max_length = 32768;
    if (out.size() % 2 == 0) stay_near(gpu.config);
    out.push_back(gpu);
  }
  for (int64_t mib = 1200; mib < 3600; mib += 200) {
    Case cpu{.machine = cpu_machine(16)};
    cpu.config.train.micro_batch = 4;
    cpu.config.data.max_length = 512;
    cpu.config.offload.host_memory = {mib << 20, 0};
    if (out.size() % 2 == 0) {
      cpu.config.offload.paths = {"/disk"};
      cpu.machine.disks.push_back({"/disk", 1LL << 40, 3e9, 2e9});
    }
    out.push_back(cpu);
  }
  return out;
}

TEST(RecomputeLevel, IsTheOneWithTheShortestStepOfThoseThatFit) {
  std::set<std::string> chosen;
  for (Case c : machines()) {
    const Plan plan = c.draft();
    if (!plan.fits) continue;
    chosen.insert(recompute_name(plan.recompute()));
    c.config.train.micro_batch = plan.numerics.micro_batch;
    double shortest = 1e300;
    for (const RecomputeChoice level : recompute_levels()) {
      c.config.train.recompute = level;
      const Plan other = c.draft();
      if (!other.fits) continue;
      shortest = std::min(shortest, other.step_seconds);
      if (level == plan.recompute() && !plan.placement.keep_norms) {
        EXPECT_NEAR(other.step_seconds, plan.step_seconds, 1e-9 * plan.step_seconds);
      }
    }
    EXPECT_LE(plan.step_seconds, shortest * (1 + 1e-9)) << recompute_name(plan.recompute());
  }
  EXPECT_TRUE(chosen.contains("none") && chosen.contains("attention") && chosen.size() >= 3)
      << ::testing::PrintToString(chosen);
}

// A level that keeps less saves memory and takes time.
TEST(RecomputeLevel, TradesMemoryForTime) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(512)};
  c.config.train.micro_batch = 4;
  int64_t saved = INT64_MAX;
  double flops = 0;
  constexpr Recompute kBlock = Recompute::kBlock;
  const RecomputeChoice levels[] = {Recompute::kNone, {kBlock, 17}, {kBlock, 4}, {kBlock, 2}, kBlock};
  for (const RecomputeChoice level : levels) {
    c.config.train.recompute = level;
    const Plan plan = c.plan();
    const bool none = level.every > 16;  // of so many layers
    EXPECT_TRUE(none ? plan.arena.saved == saved : plan.arena.saved < saved) << recompute_name(level);
    EXPECT_TRUE(none ? plan.estimate.cost.gemm_flops == flops : plan.estimate.cost.gemm_flops > flops);
    saved = plan.arena.saved, flops = plan.estimate.cost.gemm_flops;
  }
}

// bf16, of every layer and token: x, q, k, v, attention's output and the stream behind it; in fp32 two rstd
// and an lse per head. What runs again are the gate's and the up projection's products.
TEST(RecomputeLevel, AttentionKeepsThePublishedBytesAndRunsTheMlpAgain) {
  Case c{.spec = llama_1b(), .machine = cpu_machine(512)};
  c.config.data.max_length = 4096;
  c.config.train.micro_batch = 1, c.config.train.global_batch = 1;
  const auto at = [&](RecomputeChoice level) {
    c.config.train.recompute = level;
    return c.plan();
  };
  const Plan none = at(Recompute::kNone), attention = at(Recompute::kAttention);
  const int64_t layer = 2 * (2048 + 3072 + 2048 + 2048) + 4 * (2 + 32);
  EXPECT_EQ(attention.arena.saved, 4096 * (16 * layer + 2 * 2048));
  const double again = 2.0 * 4096 * 16 * 2 * 8192 * 2048;
  EXPECT_NEAR(attention.estimate.cost.gemm_flops - none.estimate.cost.gemm_flops, again, 1e-9 * again);
  EXPECT_EQ(attention.estimate.cost.attention_flops, none.estimate.cost.attention_flops);
}

// In slots there are three blocks' activations; what leaves is what had been in the arena.
TEST(RecomputeLevel, WhatItKeepsMayLeaveTheDevice) {
  for (const RecomputeChoice level : recompute_levels()) {
    SCOPED_TRACE(recompute_name(level));
    Case c{.spec = llama_1b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
    stay_near(c.config);
    c.config.train.recompute = level;
    c.config.train.micro_batch = 1;
    const Plan near = c.plan();
    c.config.offload.activations = OffloadTier::kHost;
    const Plan far = c.plan();
    EXPECT_EQ(far.recompute(), level);
    const PoolPlan& pool = far.placement.pool(Pool::kActivations);
    EXPECT_EQ(pool.slots, 4);
    EXPECT_LT(far.arena.bytes + pool.slots * pool.slot_bytes, near.arena.bytes);
    const auto before = static_cast<double>(near.arena.saved);
    const auto after = static_cast<double>(far.arena.saved + pool.off_device_bytes(TierId::kHost));
    EXPECT_NEAR(after, before, 0.03 * before);
  }
}

// The plan takes it where nothing else fits, and keeps the level that was asked for.
TEST(RecomputeLevel, KeptActivationsLeaveADeviceThatIsTooSmallForThem) {
  Case c{.spec = llama_1b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
  c.config.train.recompute = Recompute::kNone;
  c.config.train.micro_batch = 1;
  c.config.data.max_length = 32768;
  const Plan roomy = c.plan();
  EXPECT_EQ(roomy.placement.pool(Pool::kActivations).slots, 0);
  c.machine.gpus[0].memory_bytes = roomy.arena.bytes;
  const Plan tight = c.plan();
  EXPECT_TRUE(tight.fits);
  EXPECT_EQ(tight.recompute(), Recompute::kNone);
  EXPECT_GT(tight.placement.pool(Pool::kActivations).off_device_bytes(TierId::kHost), 0);
}

// Two of each layer, bf16; a level that was asked for keeps what it says.
TEST(RecomputeLevel, OutputsOfNormsAreKeptWhereMemoryAllows) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
  stay_near(c.config);
  c.config.train.method = Method::kLora;
  c.config.data.max_length = 2048;
  c.config.train.micro_batch = 2;
  const Plan kept = c.plan();
  EXPECT_TRUE(kept.placement.keep_norms && kept.step.keep_norms);
  EXPECT_EQ(kept.recompute(), Recompute::kNone);
  EXPECT_NE(print_plan(kept).find("outputs of norms"), std::string::npos);
  c.config.train.recompute = Recompute::kNone;
  const Plan without = c.plan();
  EXPECT_FALSE(without.placement.keep_norms);
  EXPECT_EQ(kept.arena.saved - without.arena.saved, int64_t{2} * 2048 * 32 * 2 * 4096 * 2);
  EXPECT_LT(kept.step_seconds, without.step_seconds);

  c.config.train.recompute = Recompute::kAuto;
  const int64_t needed = kept.tiers.front().bytes;
  for (const int64_t spare : {kMiB, -kMiB}) {
    c.config.offload.device_memory = {.bytes = needed + spare};
    const Plan plan = c.plan();
    EXPECT_TRUE(plan.fits);
    EXPECT_EQ(plan.placement.keep_norms, spare > 0);
    EXPECT_EQ(plan.recompute(), Recompute::kNone);
  }
}

TEST(RecomputeLevel, OutputsOfNormsAreNotKeptWhereSomethingMoves) {
  Case c{.spec = llama_1b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
  c.config.train.micro_batch = 1;
  EXPECT_TRUE(c.plan().placement.keep_norms);
  c.config.offload.optimizer = OffloadTier::kHost;
  EXPECT_FALSE(c.plan().placement.keep_norms);
  Case weights{.spec = llama_1b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
  weights.config.train.method = Method::kLora;
  weights.config.data.max_length = 2048;
  weights.config.train.micro_batch = weights.config.train.global_batch = 32;  // bound by compute
  weights.config.offload.weights = OffloadTier::kHost;
  EXPECT_FALSE(weights.plan().placement.keep_norms);
  Case cpu{.machine = cpu_machine(64)};
  EXPECT_FALSE(cpu.plan().placement.keep_norms);
}

TEST(RecomputeLevel, IsRecordedAndKept) {
  for (const RecomputeChoice level : recompute_levels()) {
    NumericsPlan numerics;
    numerics.recompute = level;
    EXPECT_EQ(parse_numerics(numerics_json(numerics), "numerics.json").recompute, level);
    Case c{.machine = cpu_machine(64), .recorded = &numerics};
    EXPECT_EQ(c.draft().recompute(), level);
  }
  EXPECT_FALSE(parse_recompute("0").has_value());
  EXPECT_FALSE(parse_recompute("2x").has_value());
  EXPECT_EQ(parse_recompute("1"), RecomputeChoice(Recompute::kBlock));
}

TEST(RecomputeLevel, IsSaidByThePlan) {
  Case c{.machine = cpu_machine(64)};
  c.config.train.recompute = {Recompute::kBlock, 3};
  EXPECT_NE(print_plan(c.plan()).find("recompute 1 block in 3"), std::string::npos);
  c.config.train.recompute = Recompute::kAttention;
  EXPECT_NE(print_plan(c.plan()).find("recompute attention"), std::string::npos);
}

}  // namespace
}  // namespace lm
