// Training with all state on disk, over the real engines: every transfer of a run fails in turn, each way,
// once and from then on. A run ends well with the numbers of one that met nothing, or with the code that its
// fault has. (tests/train/offload_faults_test.cpp: more kinds of run, on a disk in memory.)
#include <gtest/gtest.h>

#include "base/error.h"
#include "failing_engine.h"
#include "rows.h"
#include "tests/train/offloaded_run.h"

namespace lm {
namespace {

using namespace offloaded_run;

Variant run_on_disk(Engine engine) {
  Variant run;
  run.steps = 2;
  run.threads = 1;
  run.engine = engine;
  run.optimizer = run.gradients = run.weights = run.activations = run.recompute = true;
  return run;
}

struct Ending {
  std::optional<Error> error;
  Outcome outcome;
  int64_t operations = 0, injected = 0;
};

Ending run_to_its_end(const Variant& run, std::optional<SimFaultAt> fault) {
  Ending out;
  OperationCounts counts;
  const IoEngineKind kind = run.engine == Engine::kUring ? IoEngineKind::kUring : IoEngineKind::kThreads;
  try {
    Training training(run, [&](const EngineSetup& setup) {
      return std::make_unique<FailingEngine>(make_engine(kind, setup, nullptr), fault, counts);
    });
    out.outcome = training.run();
  } catch (const Error& error) {
    out.error = error;
  }
  out.operations = counts.operations;
  out.injected = counts.injected;
  return out;
}

struct Kind {
  const char* name;
  SimFault fault;
  Exit code;  // where it cannot be made good
};
constexpr Kind kKinds[] = {{"EIO", SimFault::kEio, Exit::kIo},
                           {"ENOSPC", SimFault::kEnospc, Exit::kNoSpace},
                           {"short", SimFault::kShort, Exit::kIo},
                           {"EINTR", SimFault::kEintr, Exit::kIo},
                           {"EAGAIN", SimFault::kEagain, Exit::kIo}};

// The fault on every `stride`-th transfer.
void on_transfers(const Variant& run, const Kind& kind, bool for_ever, int64_t stride, Row& row) {
  const Outcome& want = reference(run);
  for (int64_t n = 0;; n += stride) {
    const Ending ending = run_to_its_end(run, SimFaultAt{kind.fault, n, for_ever});
    if (n >= ending.operations) {  // it has ended before
      EXPECT_EQ(ending.injected, 0);
      EXPECT_FALSE(ending.error);
      EXPECT_GT(n, 50);
      return;
    }
    if (ending.injected == 0) continue;  // a read, of a fault that writes have
    row.tried();
    row.count(ending.error ? "exit " + std::to_string(static_cast<int>(ending.error->code())) : "made good");
    const bool harmless = !for_ever && (kind.fault == SimFault::kShort || kind.fault == SimFault::kEintr ||
                                        kind.fault == SimFault::kEagain);
    EXPECT_TRUE(!harmless || !ending.error) << "nothing was wrong";
    // A write that finds no room once goes to another place.
    EXPECT_TRUE(ending.error || !for_ever || kind.fault != SimFault::kEnospc)
        << "no space, and nobody said so";
    if (ending.error) {
      EXPECT_EQ(ending.error->code(), kind.code) << ending.error->report();
    } else {
      EXPECT_TRUE(ending.outcome.losses == want.losses && ending.outcome.norms == want.norms &&
                  ending.outcome.state == want.state)
          << "a wrong result";
    }
    ASSERT_FALSE(::testing::Test::HasFailure())
        << kind.name << (for_ever ? " for ever" : " once") << " at transfer " << n << ", " << run.text();
  }
}

// `slow_stride`: of EAGAIN for ever, which is tried again for a second.
void on_all_engines(int64_t stride, int64_t slow_stride) {
  Row row("training_transfers", "the n-th transfer of training with all state on disk fails",
          "in front of io_uring and of the pread/pwrite threads: EIO, ENOSPC, short, EINTR, EAGAIN; once and "
          "for ever");
  const bool ring = ring_allowed();
  for (const Engine engine : {Engine::kThreads, Engine::kUring}) {
    if (engine == Engine::kUring && !ring) continue;
    const Variant run = run_on_disk(engine);
    row.figure(engine == Engine::kUring ? "transfers, io_uring" : "transfers, threads",
               run_to_its_end(run, {}).operations);
    for (const Kind& kind : kKinds) {
      for (const bool for_ever : {false, true}) {
        const bool slow = for_ever && kind.fault == SimFault::kEagain;
        ASSERT_NO_FATAL_FAILURE(on_transfers(run, kind, for_ever, slow ? slow_stride : stride, row));
      }
    }
  }
  row.figure("stride", stride);
  row.write();
  if (!ring) GTEST_SKIP() << "io_uring is refused here: the faults went to threads alone";
}

TEST(TrainingFaults, SomeTransfers) {
  on_all_engines(13, 67);
}

TEST(TrainingFaults, EveryTransfer) {
  on_all_engines(1, 7);
}

}  // namespace
}  // namespace lm
