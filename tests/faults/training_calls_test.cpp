// Training with all state on disk: every system call of its set-up fails in turn (the swap files, their room,
// the engine), and every transfer of a step under which a save rides. A run ends well with the numbers of one
// that met nothing, or with the code that its fault has; a checkpoint that has its name is whole, and of its
// own step.
#include <gtest/gtest.h>

#include <filesystem>

#include "base/error.h"
#include "base/file.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "failing_calls.h"
#include "failing_engine.h"
#include "rows.h"
#include "tests/train/offloaded_run.h"

namespace lm {
namespace {

using namespace offloaded_run;
namespace fs = std::filesystem;

constexpr int64_t kMostOperations = 10000;

struct Kind {
  const char* name;
  SimFault fault;
  Exit code;  // where it cannot be made good
};
constexpr Kind kKinds[] = {{"EIO", SimFault::kEio, Exit::kIo},
                           {"ENOSPC", SimFault::kEnospc, Exit::kNoSpace},
                           {"EINTR", SimFault::kEintr, Exit::kIo},
                           {"EAGAIN", SimFault::kEagain, Exit::kIo}};

Variant run_on_disk(Engine engine) {
  Variant run;
  run.steps = 2;
  run.threads = 1;
  run.engine = engine;
  run.optimizer = run.gradients = run.weights = run.activations = run.recompute = true;
  return run;
}

IoEngineKind kind_of(Engine engine) {
  return engine == Engine::kUring ? IoEngineKind::kUring : IoEngineKind::kThreads;
}

std::vector<Engine> engines() {
  return ring_allowed() ? std::vector{Engine::kThreads, Engine::kUring} : std::vector{Engine::kThreads};
}

std::string ending(const std::optional<Error>& error) {
  return error ? "exit " + std::to_string(static_cast<int>(error->code())) : "made good";
}

// The n-th call between the start and the first step. False: there are not so many.
bool set_up_with(const Kind& kind, bool for_ever, int64_t n, const Variant& run, Row& row) {
  std::optional<Error> error;
  std::unique_ptr<Training> training;
  failing_calls::plan({kind.fault, n, for_ever});
  try {
    training = std::make_unique<Training>(
        run, [&](const EngineSetup& setup) { return make_engine(kind_of(run.engine), setup, nullptr); });
  } catch (const Error& e) {
    error = e;
  }
  if (failing_calls::stop() == 0) return false;
  row.tried();
  row.count(ending(error));
  const std::string first = failing_calls::first();
  if (error) {
    // A directory that cannot hold such a file is refused as one that does not fit this machine (12).
    EXPECT_TRUE(error->code() == kind.code || error->code() == Exit::kIo ||
                error->code() == Exit::kDoesNotFit)
        << error->report();
    EXPECT_FALSE(error->text().place.empty()) << error->report();
  } else {
    const Outcome got = training->run();
    const Outcome& want = reference(run);
    EXPECT_TRUE(got.losses == want.losses && got.state == want.state) << "a wrong result";
  }
  EXPECT_FALSE(::testing::Test::HasFailure()) << kind.name << " at call " << n << ", " << first;
  return true;
}

TEST(TrainingCalls, EveryOneOfTheSetUp) {
  Row row("training_setup", "the n-th system call of training's set-up fails",
          "open, fallocate, write, ... of the swap files and the engine: EIO, ENOSPC, EINTR, EAGAIN; once "
          "and for "
          "ever");
  for (const Engine engine : engines()) {
    const Variant run = run_on_disk(engine);
    (void)reference(run);  // before any call fails
    for (const Kind& kind : kKinds) {
      for (const bool for_ever : {false, true}) {
        int64_t n = 0;
        while (n < kMostOperations && set_up_with(kind, for_ever, n, run, row)) ++n;
        ASSERT_FALSE(::testing::Test::HasFailure());
        EXPECT_GE(n, 2);
        row.figure(engine == Engine::kUring ? "calls, io_uring" : "calls, threads", n);
      }
    }
  }
  row.write();
}

class RidingSaves : public ::testing::Test {
 protected:
  void SetUp() override { fs::remove_all(directory_); }
  void TearDown() override { fs::remove_all(directory_); }

  struct Ending {
    std::optional<Error> error;
    int64_t before = 0, operations = 0, injected = 0;  // transfers before the second step, and of all
    State state;                                       // after the second step, where nothing failed
  };
  // A step, a save of it, and a second step, under which that rides and the swap file's transfers fail.
  Ending ride(const Variant& run, std::optional<SimFaultAt> fault) {
    Ending out;
    OperationCounts counts;
    fs::remove_all(directory_);
    try {
      Training training(run, [&](const EngineSetup& setup) {
        return std::make_unique<FailingEngine>(make_engine(kind_of(run.engine), setup, nullptr), fault,
                                               counts);
      });
      training.step(1);
      out.before = counts.operations;
      const StateCatalogue catalogue = training.catalogue();
      Save save({.directory = directory_, .step = 1, .catalogue = catalogue, .engine = kind_of(run.engine)});
      Manifest manifest;
      manifest.step = 1;
      const std::unique_ptr<StepSave> riding = training.train_step().begin_save(
          {.catalogue = catalogue, .sink = save, .complete = [&] { save.commit(manifest); }});
      try {
        training.step(2);
        riding->finish();
      } catch (const Error& error) {
        out.error = error;
      }
      training.train_step().end_save();
      if (!out.error) out.state = training.state();
    } catch (const Error& error) {
      out.error = error;
    }
    out.operations = counts.operations;
    out.injected = counts.injected;
    return out;
  }

  std::string shard() const {
    return read_small_file(directory_ + "/step_00000001/rank00000.safetensors", 1 << 30);
  }

  void on_rides(int64_t stride) {
    Row row("riding_saves", "the n-th transfer of a step under which a save rides fails",
            "of the swap files, in front of io_uring and of the pread/pwrite threads: EIO, ENOSPC, EINTR, "
            "EAGAIN; once and for ever");
    for (const Engine engine : engines()) {
      const Variant run = run_on_disk(engine);
      const Ending plain = ride(run, {});
      ASSERT_FALSE(plain.error) << plain.error->report();
      const std::string saved = shard();
      EXPECT_GT(plain.operations - plain.before, 20);
      for (const Kind& kind : kKinds) {
        for (const bool for_ever : {false, true}) {
          for (int64_t n = plain.before; n < plain.operations; n += stride) {
            const Ending got = ride(run, SimFaultAt{kind.fault, n, for_ever});
            if (got.injected == 0) continue;
            judge(kind, got, plain, saved, row);
            ASSERT_FALSE(HasFailure())
                << kind.name << (for_ever ? " for ever" : " once") << " at transfer " << n;
          }
        }
      }
      row.figure(engine == Engine::kUring ? "transfers, io_uring" : "transfers, threads",
                 plain.operations - plain.before);
    }
    row.figure("stride", stride);
    row.write();
  }

  void judge(const Kind& kind, const Ending& got, const Ending& plain, const std::string& saved, Row& row) {
    row.tried();
    const std::vector<FoundCheckpoint> found = find_checkpoints(directory_);
    row.count(ending(got.error) + (found.empty() ? ", no checkpoint" : ", its checkpoint whole"));
    if (got.error) {
      EXPECT_EQ(got.error->code(), kind.code) << got.error->report();
    } else {
      EXPECT_TRUE(got.state == plain.state) << "a wrong result";
      EXPECT_FALSE(found.empty()) << "the save is lost, and nobody said so";
    }
    // What failed leaves nothing behind.
    int64_t names = 0;
    for ([[maybe_unused]] const auto& entry : fs::directory_iterator(directory_)) ++names;
    EXPECT_EQ(names, std::ssize(found));
    if (!found.empty()) {
      EXPECT_TRUE(found.front().manifest) << found.front().problem;
      EXPECT_TRUE(shard() == saved) << "the checkpoint is not of its step";
    }
  }

  const std::string directory_ =
      (fs::temp_directory_path() / ("lmlaunch_riding-" + std::to_string(getpid()))).string();
};

TEST_F(RidingSaves, SomeTransfers) {
  on_rides(37);
}

TEST_F(RidingSaves, EveryTransfer) {
  on_rides(1);
}

}  // namespace
}  // namespace lm
