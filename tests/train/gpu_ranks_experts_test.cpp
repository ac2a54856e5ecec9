// Experts that are divided among ranks with a GPU each.
#include <gtest/gtest.h>

#include <iterator>
#include <sstream>
#include <vector>

#include "gpu_rank_runs.h"

namespace lm {
namespace {

using namespace gpu_rank_runs;

// Losses and norms, in the order of the steps.
std::vector<double> numbers_of(const Findings& found) {
  std::istringstream text(found.numbers);
  return {std::istream_iterator<double>(text), std::istream_iterator<double>()};
}

// Rows go to their owners over NCCL as over host memory. The products are others than those of replicated
// experts, which are multiplied together: of their results rounding alone differs.
TEST(GpuRanks, DividedExpertsTakeTheRowsOfAllRanks) {
  LM_NEEDS_GPU();
  for (int which = 0; which < 4; ++which) {
    Variant run = small_run();
    run.lora = true;
    run.family = which == 0   ? Family::kManyExperts
                 : which == 2 ? Family::kBiasedExperts
                              : Family::kEightExperts;
    run.weights = which == 0 || which == 3;  // on a disk, or in host memory
    run.host = which == 3 ? 1 : 0;
    run.base = which == 1 ? EncodingKind::kNf4 : EncodingKind::kPlain;
    run.dtype = DType::kF32, run.fp32_adapters = true;
    run.adapted_experts = which >= 2;
    run.stage = which == 0 ? 2 : which == 3 ? 0 : 3;
    Findings replicated, nccl, host;
    run_gpus(run, 2, true, replicated);
    run.parallel = true;
    run_gpus(run, 2, true, nccl);
    run_gpus(run, 2, false, host);
    expect_same(nccl, host, run);
    const std::vector<double> want = numbers_of(replicated), got = numbers_of(nccl);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-4 * want[i]) << run.text();
  }
}

}  // namespace
}  // namespace lm
