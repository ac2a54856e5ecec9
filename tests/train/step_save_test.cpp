// A save that rides on the next step has the bytes of a flush and a pass over everything after its own step,
// and the run does not notice it. Built twice: for the CPU, and for a GPU, where it skips without one.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <random>
#include <thread>

#include "base/error.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "saving.h"
#include "tests/support/counts.h"
#include "tests/support/device_test.h"

namespace lm {
namespace {

using namespace saving;
class StepSaves : public DeviceTest {};
TEST_F(StepSaves, OfDrawnRunsIsThatOfAFlushAndAPass) {
  std::mt19937 random(5);
  const bool ring = ring_allowed();
  int without_ring = 0;
  for (int i = 0; i < test::counts(15, 30); ++i) {
    Variant run = drawn_variant(random, i);
    run.steps = 7;
    if (run.engine == Engine::kUring && !ring) {
      run.engine = Engine::kThreads;
      ++without_ring;
    }
    expect_saves_unnoticed(run);
    if (testing::Test::HasFailure()) return;
  }
  if (without_ring > 0)
    GTEST_SKIP() << "io_uring is refused here: " << without_ring << " runs drawn for it ran on threads";
}

// Updates follow the check here too, if the norm is global; and no tile is read while it may pass through a
// slot.
TEST_F(StepSaves, OfUpdatesInsideBackwardIsThatOfAFlushAndAPass) {
  std::mt19937 random(6);
  for (int i = 0; i < test::counts(8, 16); ++i) {
    Variant run = drawn_variant(random, i);
    run.steps = 7, run.in_backward = true, run.engine = Engine::kSim;
    if (i % 2 == 0) run.clip = Clip::kGlobal;
    expect_saves_unnoticed(run, std::chrono::microseconds(i % 4 == 0 ? 500 : 0));
    if (testing::Test::HasFailure()) return;
  }
}

// The step is at its check long before.
TEST_F(StepSaves, WhatStaysOnTheDeviceWaitsForASlowDisk) {
  for (const Clip clip : {Clip::kGlobal, Clip::kBlock}) {
    for (const bool mixed : {false, true}) {
      Variant run;
      run.steps = 4, run.clip = clip;
      run.optimizer = run.mixed = mixed;
      expect_saves_unnoticed(run, std::chrono::milliseconds(2));
    }
  }
}

// Where checkpoint.every is a time nothing waits for it: what was lent is whole before the updates after the
// next.
TEST_F(StepSaves, ThatOutlastsTheNextStepHasItsBytes) {
  // With a slot for each tile none has to be taken back before the check.
  for (const int64_t slots : {2, 64}) {
    Variant run;
    run.optimizer = true, run.mixed = slots == 2, run.slots = slots;
    Training plain(run), training(run);
    plain.step(1);
    const Bytes want = plain.state();
    training.step(1);  // nothing waits for a GPU's updates
    Saving saving(training, -1, std::chrono::milliseconds(10));
    for (int64_t s = 2; s <= 3; ++s) plain.step(s), training.step(s);
    expect_equal(saving.finish(), want);
    expect_equal(training.state(), plain.state());
  }
}

TEST_F(StepSaves, OfStateOnDiskReadsNothing) {
  Variant run;
  run.optimizer = run.gradients = run.weights = run.activations = run.recompute = true;
  run.micro_batches = 4, run.group = 2, run.granules = 3;
  const auto moved = [&](bool save) {
    Training training(run);
    std::unique_ptr<Saving> saving;
    for (int64_t s = 1; s <= 8; ++s) {
      training.step(s);
      if (save && saving != nullptr) saving->finish(), saving.reset();
      if (save && s < 8) saving = std::make_unique<Saving>(training);
    }
    return training.rank().off_device().counters();
  };
  const IoCounters without = moved(false), with = moved(true);
  EXPECT_GT(without.read_bytes, 1 << 20);
  EXPECT_EQ(with.read_bytes, without.read_bytes);
  EXPECT_EQ(with.written_bytes, without.written_bytes);
}

TEST_F(StepSaves, ThatFailsSaysSoOnceAndTheRunGoesOn) {
  for (const bool disk : {false, true}) {
    Variant run;
    run.optimizer = run.weights = disk, run.mixed = disk;
    Training plain(run);
    for (int64_t s = 1; s <= 3; ++s) plain.step(s);
    const Bytes want = plain.state();
    int64_t failures = 0;
    for (int64_t writes = 0; writes < 40; writes += 3) {
      SCOPED_TRACE(writes);
      Training training(run);
      training.step(1);
      std::unique_ptr<Saving> saving;
      const auto failed = [&](const auto& body) {
        try {
          body();
          return false;
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), Exit::kNoSpace) << error.what();
          return true;
        }
      };
      const bool begun = !failed([&] { saving = std::make_unique<Saving>(training, writes); });
      training.step(2);  // throws nothing of the save
      if (!begun || failed([&] { saving->finish(); })) ++failures;
      training.step(3);
      expect_equal(training.state(), want);
    }
    EXPECT_GT(failures, 3);
  }
}

// A step that is skipped has no updates: with some still to come there is nothing to ride on.
TEST_F(StepSaves, OfASkippedStepIsThatOfAFlushAndAPass) {
  for (const bool disk : {false, true}) {
    Variant run;
    run.optimizer = run.weights = disk;
    SCOPED_TRACE(disk);
    Training plain(run), training(run);
    const auto lr = [](int64_t s) { return s == 2 ? 1e38 : 3e-3; };  // those after the second are skipped
    std::unique_ptr<Saving> saving;
    Bytes want;
    for (int64_t s = 1; s <= 4; ++s) {
      plain.step(s, lr(s));
      EXPECT_EQ(training.step(s, lr(s)).skipped, s > 2);
      if (saving != nullptr) expect_equal(saving->finish(), want);
      want = plain.state();
      saving.reset();
      saving = std::make_unique<Saving>(training);
    }
    training.flush();
    expect_equal(saving->finish(), want);
  }
}

TEST_F(StepSaves, GivenUpInTheMiddleLeavesTheRunAlone) {
  Variant run;
  run.optimizer = true, run.mixed = true;
  Training plain(run), training(run);
  for (int64_t s = 1; s <= 4; ++s) {
    plain.step(s), training.step(s);
    const Saving saving(training, -1, std::chrono::milliseconds(1));
  }
  expect_equal(training.state(), plain.state());
}

// Takes long for each request.
class SlowEngine : public IoEngine {
 public:
  explicit SlowEngine(std::unique_ptr<IoEngine> inner) : inner_(std::move(inner)) {}
  int depth() const override { return inner_->depth(); }
  void submit(const IoRequest& request) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    inner_->submit(request);
  }
  void wait(std::vector<IoResult>& results) override { inner_->wait(results); }
  void wake() override { inner_->wake(); }
  std::string description() const override { return inner_->description(); }

 private:
  std::unique_ptr<IoEngine> inner_;
};

// Half of the state comes with the next step's updates; of a resident run all is written from where it lies,
// and the step's own update waits for that.
TEST_F(StepSaves, ComesBackFromAShard) {
  const std::string directory = (std::filesystem::temp_directory_path() / "lmlaunch_step_save").string();
  for (const bool resident : {false, true}) {
    SCOPED_TRACE(resident);
    std::filesystem::remove_all(directory);
    Variant run;
    run.optimizer = run.mixed = !resident;
    Training plain(run), training(run);
    plain.step(1), training.step(1);
    const StateCatalogue catalogue = training.catalogue();
    const auto slow = [](const EngineSetup& setup) {
      return std::make_unique<SlowEngine>(make_engine(IoEngineKind::kThreads, setup, nullptr));
    };
    Save save({.directory = directory, .step = 1, .catalogue = catalogue, .make_engine = slow});
    Manifest manifest;
    manifest.step = 1;
    const std::unique_ptr<StepSave> riding = training.train_step().begin_save(
        {.catalogue = catalogue, .sink = save, .complete = [&] { save.commit(manifest); }});
    training.step(2);
    riding->finish();
    training.train_step().end_save();
    CheckpointReader reader(directory + "/step_00000001");
    for (const auto& [name, want] : plain.state()) {
      if (name == "optimizer.t") {
        EXPECT_EQ(reader.manifest().numbers.at(name), 1);
        continue;
      }
      std::vector<std::byte> got(want.size());
      reader.read(name, 0, got);
      EXPECT_TRUE(got == want) << name;
    }
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace lm
