// Saves of ranks with a GPU each ride on their steps too, beside the gathers of weights: the order checker
// sees whether they read what is being gathered.
#include <gtest/gtest.h>

#include "saving.h"
#include "tests/support/gpu_ranks.h"

namespace lm {
namespace {

using namespace saving;

// Where state lives, besides in shards.
std::vector<Variant> tiers(bool lora) {
  Variant resident;
  resident.lora = lora, resident.tied = lora;  // an embedding by itself goes to host memory with the weights
  resident.micro_batches = 2;
  resident.steps = 5, resident.layers = 2, resident.vocab = 128;
  resident.slots_on_device = true;
  resident.granules = 3;
  std::vector<Variant> out(5, resident);
  out[1].optimizer = true;                   // on disk
  out[2].optimizer = out[2].on_host = true;  // in host memory, updated there
  out[3].weights = true;
  out[4].optimizer = out[4].weights = out[4].gradients = true;
  for (size_t i = 2; i < out.size(); ++i) out[i].host = 1;
  return out;
}

void expect_saves_unnoticed_of_gpus(const std::vector<Variant>& runs, int64_t stage,
                                    std::chrono::microseconds delay = {}) {
  expect_good_ends(with_gpus({.ranks = 2, .seconds = 300}, [&](GpuRank& rank) {
    for (Variant run : runs) {
      run.stage = stage;
      expect_saves_unnoticed(run, delay, &rank.peers, &rank.group);
    }
  }));
}

class GpuRanksSaves : public testing::TestWithParam<int> {};  // by stage
INSTANTIATE_TEST_SUITE_P(Stage, GpuRanksSaves, testing::Range(0, 4));

TEST_P(GpuRanksSaves, OfAllWeightsAreThoseOfAFlushAndAPass) {
  LM_NEEDS_GPU();
  expect_saves_unnoticed_of_gpus(tiers(false), GetParam());
}

TEST_P(GpuRanksSaves, OfAdaptersAreThoseOfAFlushAndAPass) {
  LM_NEEDS_GPU();
  expect_saves_unnoticed_of_gpus(tiers(true), GetParam());
}

// The step is at its check long before, and slots are wanted back.
TEST_P(GpuRanksSaves, WhatStaysOrPassesThroughSlotsWaitsForASlowDisk) {
  LM_NEEDS_GPU();
  const std::vector<Variant> all = tiers(false);
  expect_saves_unnoticed_of_gpus({all.front(), all.back()}, GetParam(), std::chrono::milliseconds(2));
}

}  // namespace
}  // namespace lm
