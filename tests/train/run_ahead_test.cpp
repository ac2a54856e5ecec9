// Steps of a resident run on a GPU, each enqueued before the host has read the results of the one before:
// they have the bits of steps one after another, a skipped one changes nothing, and it is counted and named
// when its results are read.
#include <gtest/gtest.h>

#include <limits>

#include "kernels/library.h"
#include "offloaded_run.h"

namespace lm {
namespace {

using namespace offloaded_run;

// The call of granule_norms, of a step, before which a number of its gradient becomes infinite.
int64_t planted_call = -1, calls = 0;
const float kInfinite = -std::numeric_limits<float>::infinity();  // the source of a copy

void plant_and_norm(const GranuleNorms& args, StreamView stream) {
  if (calls++ == planted_call)
    copy_bytes(const_cast<void*>(args.x), &kInfinite, sizeof kInfinite, stream);  // its last bytes are bf16's
  library_kernels(DeviceType::kCuda).granule_norms(args, stream);
}

const Kernels& planting_kernels() {
  static const Kernels kernels = [] {
    Kernels out = library_kernels(DeviceType::kCuda);
    out.granule_norms = plant_and_norm;
    return out;
  }();
  return kernels;
}

constexpr int64_t kSteps = 6, kBadStep = 4;

struct Ran {
  std::vector<StepResult> results;
  State state;
  int64_t updates = 0;
};

// `ahead`: at most one step's results are unread.
Ran train(Variant run, bool ahead, int64_t bad_call) {
  planted_call = -1;
  run.kernels = &planting_kernels();
  Training training(run);
  EXPECT_TRUE(training.train_step().runs_ahead());
  const int64_t norms = std::ssize(training.reduced_units());
  Ran out;
  for (int64_t s = 1; s <= kSteps; ++s) {
    // Of a step the gradients' come first: Muon's updates call it, too.
    calls = 0;
    planted_call = bad_call >= 0 && s == kBadStep ? bad_call % norms : -1;
    training.start(s);
    if (s > 1 || !ahead) out.results.push_back(training.train_step().finish());
  }
  if (ahead) out.results.push_back(training.train_step().finish());
  out.state = training.state();
  out.updates = training.copy().updates;
  return out;
}

class RunAhead : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda_device_count(&reason) == 0) GTEST_SKIP() << "no CUDA device: " << reason;
  }
};

std::vector<Variant> variants() {
  std::vector<Variant> out(5);
  out[1].lora = true;
  out[2].rule = Rules::id<AdamW8bit>(), out[2].micro_batches = 2;
  out[3].rule = Rules::id<Adafactor>(), out[3].gradient_dtype = DType::kBF16;
  out[4].rule = Rules::id<Muon>();
  return out;
}

TEST_F(RunAhead, HasTheBitsOfStepsOneAfterAnother) {
  for (const Variant& run : variants()) {
    for (const int64_t bad_call : {-1, 0, 2}) {
      SCOPED_TRACE(run.text() + ", bad norm " + std::to_string(bad_call));
      const Ran one = train(run, false, bad_call), ahead = train(run, true, bad_call);
      ASSERT_EQ(std::ssize(one.results), kSteps);
      ASSERT_EQ(std::ssize(ahead.results), kSteps);
      for (int64_t s = 1; s <= kSteps; ++s) {
        const StepResult &a = one.results[static_cast<size_t>(s - 1)],
                         &b = ahead.results[static_cast<size_t>(s - 1)];
        const bool bad = bad_call >= 0 && s == kBadStep;
        EXPECT_EQ(a.skipped, bad) << "step " << s;
        EXPECT_EQ(b.skipped, bad) << "step " << s;
        EXPECT_EQ(a.loss, b.loss) << "step " << s;
        EXPECT_EQ(a.token_accuracy, b.token_accuracy) << "step " << s;
        if (!bad) {
          EXPECT_EQ(a.grad_norm, b.grad_norm) << "step " << s;
          EXPECT_EQ(b.fault, "");
          continue;
        }
        EXPECT_EQ(a.fault, b.fault);
        EXPECT_TRUE(b.fault.starts_with("the gradient of tensor ")) << b.fault;
        EXPECT_TRUE(b.fault.ends_with(" is inf (rank 0)")) << b.fault;
      }
      EXPECT_TRUE(ahead.state == one.state);
      EXPECT_EQ(ahead.updates, bad_call >= 0 ? kSteps - 1 : kSteps);
      EXPECT_EQ(one.updates, ahead.updates);
    }
  }
}

// The state after a skipped step is that after the step before.
TEST_F(RunAhead, ASkippedStepChangesNothing) {
  for (Variant run : variants()) {
    SCOPED_TRACE(run.text());
    planted_call = -1, calls = 0;
    run.kernels = &planting_kernels();
    Training training(run);
    training.step(1);
    const State before = training.state();
    planted_call = calls;
    EXPECT_TRUE(training.step(2).skipped);
    EXPECT_TRUE(training.state() == before);
    EXPECT_FALSE(training.step(3).skipped);
    EXPECT_FALSE(training.state() == before);
  }
}

// Where something else decides, the host waits: transfers, clipping by blocks, an objective of the nll.
TEST_F(RunAhead, IsForResidentRunsAlone) {
  Variant moves, clips, weighs;
  moves.optimizer = true, moves.host = 1, moves.slots_on_device = true;
  clips.clip = Clip::kBlock;
  weighs.weighed = true;
  for (const Variant& run : {moves, clips, weighs}) {
    SCOPED_TRACE(run.text());
    Training training(run);
    EXPECT_FALSE(training.train_step().runs_ahead());
    EXPECT_FALSE(training.step(1).skipped);
  }
}

}  // namespace
}  // namespace lm
