// Seeds of faults against the real link, votes, liveness and saves of a job whose ranks are values
// (simulated_job.h): all ranks end, with one code and one culprit or as if nothing had happened; what a save
// has acknowledged is there; the same job, started again, ends with the undisturbed bits.
// LM_SEED=N begins there, LM_SEEDS=N tries so many.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "../support/counts.h"
#include "../weights/support.h"
#include "simulated_job.h"

namespace lm::test {
namespace {

int64_t number(const char* variable, int64_t otherwise) {
  const char* const text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoll(text);
}

std::vector<float> undisturbed(const Job& job) {
  return undisturbed_weights(job.shape, job.ranks, job.seed, job.steps);
}

// Thousands of checkpoints of a few pages: in memory where there is such a file system.
void keep_files_in_memory() {
  if (::access("/dev/shm", W_OK) == 0) ::setenv("TMPDIR", "/dev/shm", 1);
}

TEST(Simulation, EverySeedKeepsItsPromises) {
  keep_files_in_memory();
  const int64_t first = number("LM_SEED", 1), seeds = number("LM_SEEDS", counts(400, 10'000));
  int64_t failed = 0, resumed = 0;
  for (int64_t seed = first; seed < first + seeds; ++seed) {
    const TemporaryDirectory directory;
    Job job = random_job(static_cast<uint64_t>(seed), 16);
    job.directory = directory / "checkpoints";
    const std::vector<float> expected = undisturbed(job);
    const JobEnd end = run_job(job);
    ASSERT_EQ(broken_promise(job, end, expected), "") << "LM_SEED=" << seed << ": " << text_of(job);
    if (!end.weights.empty()) continue;
    ++failed;
    Job again = job;
    again.faults.clear();
    const JobEnd second = run_job(again);
    ASSERT_EQ(broken_promise(again, second, expected), "")
        << "again, LM_SEED=" << seed << ": " << text_of(job);
    ASSERT_EQ(second.weights, expected) << "LM_SEED=" << seed;
    resumed += second.began > 0 ? 1 : 0;
  }
  std::printf("%lld seeds: %lld jobs failed and were started again, %lld from a checkpoint\n",
              static_cast<long long>(seeds), static_cast<long long>(failed), static_cast<long long>(resumed));
  EXPECT_GT(failed, seeds / 3);
  EXPECT_GT(resumed, seeds / 10);
}

TEST(Simulation, ASeedRepeatsItsFaults) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const TemporaryDirectory one, two;
    Job job = random_job(seed, 8);
    job.directory = one.path();
    const JobEnd first = run_job(job);
    job.directory = two.path();
    const JobEnd second = run_job(job);
    EXPECT_EQ(first.seconds, second.seconds) << text_of(job);
    for (size_t r = 0; r < first.ranks.size(); ++r)
      EXPECT_EQ(first.ranks[r].text, second.ranks[r].text) << text_of(job);
  }
}

// Arrays of a list are as long as one another: one of another unit must not be taken for the one that is due.
TEST(Simulation, BytesOfAnotherUnitAreNotUsed) {
  for (int64_t run = 0; run < 48; ++run) {
    const int64_t operation = run / 2;
    const StepShape shape{.layers = 3,
                          .micro_batches = 2,
                          .stage = 3,
                          .recompute = Recompute::kBlock,
                          .slots = 1,
                          .experts = run % 2 == 1};
    Job job{.ranks = 3, .shape = shape, .seed = 1};
    job.faults = {Fault{.kind = Fault::Kind::kOtherList, .rank = 2, .step = 2, .operation = operation}};
    EXPECT_EQ(broken_promise(job, run_job(job), undisturbed(job)), "") << text_of(job);
  }
}

// Of thousands of ranks one dies without a word: all others end with one code, and name it.
TEST(Simulation, ThousandsOfRanksEndTogether) {
  const int ranks = static_cast<int>(counts(512, 4096));
  Job job{.ranks = ranks, .each = 8, .steps = 2, .seed = 7, .lists = false};
  EXPECT_EQ(broken_promise(job, run_job(job), {}), "");
  job.faults = {Fault{.kind = Fault::Kind::kDeath, .rank = ranks / 3, .at = 0.05}};
  const JobEnd end = run_job(job);
  EXPECT_EQ(broken_promise(job, end, {}), "") << text_of(job);
  EXPECT_TRUE(end.weights.empty());
}

}  // namespace
}  // namespace lm::test
