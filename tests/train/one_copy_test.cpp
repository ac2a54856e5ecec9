// Ranks of a machine that have one copy of what is frozen: the bits of a copy for each.
#include <gtest/gtest.h>

#include "thread_ranks.h"

namespace lm {
namespace {

using namespace offloaded_run;

// One copy of what is frozen, which the first rank of a machine loads, against a copy of each rank.
TEST(Ranks, OneCopyOfTheFrozenWeightsGivesTheSameBits) {
  for (int which = 0; which < 7; ++which) {
    Variant run;
    const int ranks = which == 6 ? 4 : 2 + which % 2;
    run.lora = true, run.micro_batches = 2 * ranks, run.steps = 4, run.tied = which % 2 == 0;
    run.dora = which == 1, run.pissa = which == 2, run.weights = which == 4, run.nodes = 1 + which / 6;
    run.stage = which == 5 ? 3 : 1, run.base = which == 3 ? EncodingKind::kNf4 : EncodingKind::kPlain;
    Variant one = run;
    one.one_copy = true;
    expect_same(one, ranks, run_ranks(one, ranks), run_ranks(run, ranks));
  }
}

// The same of what is offloaded to host memory, as GPUs fetch it from there: all of it, half of it beside
// disks, with an embedding that is used in place, and of experts the chosen ones.
TEST(Ranks, OneCopyOfAnOffloadedBaseGivesTheSameBits) {
  for (int which = 0; which < 6; ++which) {
    Variant run;
    const int ranks = which == 5 ? 4 : 2 + which % 2;
    run.lora = true, run.micro_batches = 2 * ranks, run.steps = 3, run.tied = which % 2 == 0;
    run.weights = run.slots_on_device = true, run.host = which == 1 || which == 4 ? 2 : 1;
    run.base = which == 2 || which == 4 ? EncodingKind::kNf4 : EncodingKind::kPlain;
    run.pissa = which == 3, run.nodes = which == 5 ? 2 : 1, run.verify = which != 5;
    if (which == 0) run.family = Family::kManyExperts, run.layers = 2;
    Variant one = run;
    one.one_copy = true;
    expect_same(one, ranks, run_ranks(one, ranks), run_ranks(run, ranks));
  }
}

}  // namespace
}  // namespace lm
