// Experts that are divided among ranks, as threads of this process: the bits are those of ranks that have all
// of them.
#include <gtest/gtest.h>

#include "tests/support/counts.h"
#include "thread_ranks.h"

namespace lm {
namespace {

using namespace offloaded_run;

// The base of an adapter on the attention.
Variant of_base(EncodingKind base, int64_t micro_batches) {
  Variant run;
  run.family = Family::kEightExperts;
  run.lora = true, run.base = base;
  run.layers = 2, run.micro_batches = micro_batches, run.steps = 5;
  run.stage = 0;
  return run;
}

TEST(ParallelExperts, GiveTheBitsOfReplicatedOnes) {
  for (const EncodingKind base : {EncodingKind::kPlain, EncodingKind::kNf4}) {
    for (const int ranks : {2, 4}) {
      Variant run = of_base(base, ranks);
      const Outcome want = run_ranks(run, ranks);
      run.parallel = true;
      for (const int64_t stage : {0, 1, 2}) {
        run.stage = stage;
        expect_same(run, ranks, run_ranks(run, ranks), want);
      }
    }
  }
}

}  // namespace
}  // namespace lm
