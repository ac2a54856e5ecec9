// The plan's rates of attention on GPUs against published ones, and what they make of a step.
#include "plan/flash_rate.h"

#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "plan/cost_model.h"
#include "shapes.h"

namespace lm {
namespace {

constexpr bool kDeterministic = true, kAnyOrder = false;

FlashCall call(bool backward, int64_t head_dim, double length, int64_t pairs) {
  return {.backward = backward, .head_dim = head_dim, .length = length, .pairs = pairs};
}

// Of the FLOP of both passes backward has 2.5 times as many.
double both(const std::function<double(const FlashCall&)>& rate, int64_t head_dim, double length,
            int64_t pairs) {
  return 3.5 /
         (1 / rate(call(false, head_dim, length, pairs)) + 2.5 / rate(call(true, head_dim, length, pairs)));
}

TEST(FlashRate, IsWithinTenPercentOfWhatOthersPublished) {
  const auto file = nlohmann::json::parse(std::ifstream(GPU_RATES));
  std::map<int64_t, std::set<double>> lengths;  // of heads of each size
  for (const auto& group : file["flash"]) {
    ASSERT_FALSE(group["source"].get<std::string>().empty());
    const auto rate = flash_rate(built_in_gpu(group["card"]), DType::kBF16, group["deterministic"]);
    ASSERT_TRUE(rate) << group["card"];
    const int64_t head_dim = group["head_dim"];
    for (const auto& row : group["rows"]) {
      const double length = row[0], published = row[3];
      const int64_t pairs = row[1];
      const std::string pass = row[2];
      const double ours = (pass == "both" ? both(rate, head_dim, length, pairs)
                                          : rate(call(pass == "backward", head_dim, length, pairs))) /
                          1e12;
      EXPECT_NEAR(ours, published, 0.1 * published)
          << group["card"] << ", heads of " << head_dim << ", " << pass << " at " << length;
      lengths[head_dim].insert(length);
    }
  }
  for (const double length : {1024, 2048, 4096, 8192, 16384}) {
    EXPECT_TRUE(lengths[64].contains(length)) << length;
    EXPECT_TRUE(lengths[128].contains(length)) << length;
  }
  EXPECT_TRUE(lengths[128].contains(32768));
}

// A pair takes as many blocks as fill the card, one on each of its 132 multiprocessors: the last turn is
// short.
TEST(FlashRate, DeterministicBackwardLeavesMultiprocessorsIdle) {
  const struct {
    int64_t pairs;
    double blocks, turns;
  } cases[] = {{256, 256, 2}, {128, 256, 2}, {64, 192, 2}, {32, 160, 2}, {132, 132, 1}, {264, 264, 2}};
  for (const auto& c : cases) {
    EXPECT_DOUBLE_EQ(flash_fill(call(true, 128, 8192, c.pairs), 132, kDeterministic),
                     c.blocks / (c.turns * 132))
        << c.pairs;
    EXPECT_EQ(flash_fill(call(true, 128, 8192, c.pairs), 132, kAnyOrder), 1) << c.pairs;
    EXPECT_EQ(flash_fill(call(false, 128, 8192, c.pairs), 132, kDeterministic), 1) << c.pairs;
  }
  // 4 pairs of 8 blocks of keys; what nobody knows is full.
  EXPECT_DOUBLE_EQ(flash_fill(call(false, 128, 1024, 4), 132, kAnyOrder), 32.0 / 132);
  EXPECT_EQ(flash_fill(call(true, 128, 1024, 4), 0, kDeterministic), 1);
}

TEST(FlashRate, IsKnownOfCardsAndTypesThatHaveFlashAttention) {
  const Gpu h100 = built_in_gpu("NVIDIA H100 80GB HBM3");
  EXPECT_TRUE(flash_rate(h100, DType::kF16, kAnyOrder));
  EXPECT_FALSE(flash_rate(h100, DType::kF32, kAnyOrder));
  EXPECT_FALSE(flash_rate(built_in_gpu("Tesla T4"), DType::kF16, kAnyOrder));
  EXPECT_FALSE(flash_rate(built_in_gpu("a card that nobody knows"), DType::kBF16, kAnyOrder));
  for (const std::string& name : built_in_gpu_names()) {
    const Gpu gpu = built_in_gpu(name);
    if (gpu.capability.major < 8) continue;
    const auto rate = flash_rate(gpu, DType::kBF16, kDeterministic);
    ASSERT_TRUE(rate) << name;
    for (const int64_t head_dim : {64, 96, 128, 256})
      EXPECT_GT(rate(call(true, head_dim, 2048, 256)), 0.05 * gpu.bf16_flops) << name;
  }
}

// ATen's functions make results of their own, and dk and dv of each query head, which are then summed.
TEST(FlashRate, WhatTheLibraryCopiesCountsBeside) {
  const std::function<double(const FlashCall&)> rate = [](const FlashCall& c) {
    return c.backward ? 2e12 : 1e12;
  };
  const auto cost_of = [&](auto args, auto kernel) {
    args.tokens = 100, args.documents.count = 2, args.dtype = DType::kBF16;
    args.heads = 8, args.kv_heads = 2, args.head_dim = 64;
    Counts counts{.cost = {}, .attention_rate = &rate};
    (counting_kernels(DeviceType::kCuda).*kernel)(args, counting_stream(counts, DeviceType::kCuda, 1));
    return counts.cost;
  };
  constexpr double kQ = 2 * 100 * 8 * 64, kKv = 2 * 100 * 2 * 64;  // bytes
  const Cost forward = cost_of(AttentionForward(), &Kernels::attention_forward);
  EXPECT_EQ(forward.bytes, 2 * kQ);
  EXPECT_DOUBLE_EQ(forward.attention_seconds, forward.attention_flops / 1e12);
  const Cost backward = cost_of(AttentionBackward(), &Kernels::attention_backward);
  EXPECT_EQ(backward.bytes, 2 * (kQ + 2 * kKv) + 2 * (kQ + kKv));
  EXPECT_DOUBLE_EQ(backward.attention_seconds, backward.attention_flops / 2e12);
  EXPECT_DOUBLE_EQ(backward.attention_flops, 2.5 * forward.attention_flops);
}

Case long_lora(int64_t length) {
  Case c{.spec = llama_8b(), .machine = gpu_machine("H200"), .device = DeviceType::kCuda};
  c.config.train.method = Method::kLora;
  c.config.data.max_length = length;
  c.config.train.micro_batch = c.config.train.global_batch = 1;
  return c;
}

// A step of one document of 32,768 tokens is mostly attention, and would be shorter without a fixed order.
TEST(FlashRate, OfOneLongDocumentMakesMostOfAStep) {
  Case c = long_lora(32768);
  const StepEstimate exact = c.plan().estimate;
  EXPECT_GT(exact.attention_seconds, 0.6 * exact.seconds);
  EXPECT_NEAR(exact.cost.timed_flops, exact.cost.attention_flops, 1e-6 * exact.cost.attention_flops);
  c.config.run.deterministic = false;
  const StepEstimate any = c.plan().estimate;
  EXPECT_GT(exact.seconds, 1.15 * any.seconds);
  EXPECT_EQ(any.cost.attention_flops, exact.cost.attention_flops);
}

// Short documents compute as many keys in half a block as they need.
TEST(FlashRate, OfShortDocumentsIsLower) {
  const auto rate_of = [](int64_t length) {
    const StepEstimate step = long_lora(length).plan().estimate;
    return step.cost.attention_flops / step.attention_seconds;
  };
  EXPECT_GT(rate_of(16384), 1.1 * rate_of(2048));
  EXPECT_GT(rate_of(2048), 1.05 * rate_of(512));
}

// In fp32 another kernel computes, of which nothing is published here.
TEST(FlashRate, OfFp32IsTheOneRateOfTheStep) {
  Case c = long_lora(2048);
  c.config.model.dtype = ModelDType::kF32;
  const Plan plan = c.plan();
  const ComputeRates rates = compute_rates(c.machine, c.device, DType::kF32);
  EXPECT_NEAR(plan.estimate.attention_seconds, plan.estimate.cost.attention_flops / rates.attention_flops,
              1e-9 * plan.estimate.attention_seconds);
}

}  // namespace
}  // namespace lm
