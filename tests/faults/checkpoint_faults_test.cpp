// Every operation of a save and of a load fails in turn, each way, once and from then on: the engine's
// transfers (FailingEngine, over a ring and over threads) and the calls around them (failing_calls). A save
// succeeds, or throws the code that its fault has; the checkpoint before it stays whole, and what follows
// works. A load gives what was saved or says why it does not.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "checkpoint/save.h"
#include "failing_calls.h"
#include "failing_engine.h"
#include "rows.h"
#include "synthetic_state.h"

namespace lm {
namespace {

using namespace synthetic_state;
namespace fs = std::filesystem;

constexpr int64_t kMostOperations = 1000;

struct Kind {
  const char* name;
  SimFault fault;
  bool for_ever;
};
constexpr Kind kKinds[] = {
    {"EIO once", SimFault::kEio, false},       {"EIO for ever", SimFault::kEio, true},
    {"ENOSPC once", SimFault::kEnospc, false}, {"ENOSPC for ever", SimFault::kEnospc, true},
    {"short once", SimFault::kShort, false},   {"short for ever", SimFault::kShort, true},
    {"EINTR once", SimFault::kEintr, false},   {"EINTR for ever", SimFault::kEintr, true},
    {"EAGAIN once", SimFault::kEagain, false}, {"EAGAIN for ever", SimFault::kEagain, true},
};

std::vector<IoEngineKind> engines() {
  std::vector<IoEngineKind> out{IoEngineKind::kThreads};
  try {
    IoFile none;
    make_engine(IoEngineKind::kUring, {.files = {&none, 0}, .buffers = {}, .depth = 1}, nullptr);
    out.push_back(IoEngineKind::kUring);
  } catch (const Error&) {  // refused on this machine
  }
  return out;
}

class CheckpointFaults : public ::testing::Test {
 protected:
  void SetUp() override { fs::remove_all(directory_); }
  void TearDown() override { fs::remove_all(directory_); }

  void save(int64_t step, SaveSetup setup) {
    setup.directory = directory_;
    setup.step = step;
    setup.buffers = &buffers_;
    Save save(setup);
    write_state(catalogue_, 10 * step, save);
    save.commit(manifest_of(step, 10 * step));
    retain_checkpoints(directory_, 1, step, {});
  }
  void save(int64_t step) { save(step, {.directory = "", .catalogue = catalogue_}); }

  std::map<int64_t, bool> checkpoints() const {  // and whether each is whole
    std::map<int64_t, bool> out;
    for (const FoundCheckpoint& found : find_checkpoints(directory_)) {
      try {
        out[found.step] = verified_seed(found.path) == 10 * found.step;
      } catch (const Error&) {
        out[found.step] = false;
      }
    }
    return out;
  }
  std::string names() const {
    std::string out;
    for (const auto& entry : fs::directory_iterator(directory_))
      out += entry.path().filename().string() + " ";
    return out;
  }

  // After `attempt`, a save of step 2 beside step 1. False: something was wrong.
  bool judge(const Kind& kind, const std::function<void()>& attempt, Row& row) {
    std::optional<Error> error;
    try {
      attempt();
    } catch (const Error& e) {
      error = e;
    }
    failing_calls::stop();
    row.tried();
    row.count(error ? "exit " + std::to_string(static_cast<int>(error->code())) : "made good");
    if (error) {
      EXPECT_EQ(error->code(), kind.fault == SimFault::kEnospc ? Exit::kNoSpace : Exit::kIo)
          << error->report();
      EXPECT_FALSE(error->text().place.empty()) << error->report();
    }
    // The kernel drops the pages of an fsync that failed: one that is made again says that all is well.
    const std::string first = failing_calls::first();
    EXPECT_TRUE(error || (first != "fsync" && first != "fdatasync")) << first << " failed, and all was well";
    const std::map<int64_t, bool> found = checkpoints();
    for (const auto& [step, whole] : found) EXPECT_TRUE(whole) << "step " << step << " of " << names();
    EXPECT_TRUE(found.contains(error ? 1 : 2)) << names();
    save(3);
    EXPECT_EQ(names(), "step_00000003 ");
    return !HasFailure();
  }

  const std::string name_ = "/checkpoint_faults-" + std::to_string(getpid());
  std::string directory_ = fs::temp_directory_path().string() + name_;
  const StateCatalogue catalogue_ = small_catalogue();
  std::unique_ptr<PinnedPool> buffers_;  // of all saves, of those that failed before it, too
};

TEST_F(CheckpointFaults, TransfersOfASave) {
  Row row("save_transfers", "the n-th transfer of a save fails",
          "in front of io_uring and of the pread/pwrite threads: EIO, ENOSPC, short, EINTR, EAGAIN; once and "
          "for ever");
  for (const IoEngineKind engine : engines()) {
    for (const Kind& kind : kKinds) {
      for (int64_t n = 0; n < kMostOperations; ++n) {
        fs::remove_all(directory_);
        save(1);
        OperationCounts counts;
        const auto failing = [&](const EngineSetup& setup) {
          return std::make_unique<FailingEngine>(make_engine(engine, setup, nullptr),
                                                 SimFaultAt{kind.fault, n, kind.for_ever}, counts);
        };
        const bool good = judge(
            kind, [&] { save(2, {.directory = "", .catalogue = catalogue_, .make_engine = failing}); }, row);
        ASSERT_TRUE(good) << kind.name << " at transfer " << n;
        if (counts.injected == 0) {
          EXPECT_GT(n, 4);
          row.figure("transfers of a save", n);
          break;
        }
      }
    }
  }
  row.figure("engines", engines().size());
  row.write();
  if (engines().size() == 1) GTEST_SKIP() << "io_uring is refused here";
}

TEST_F(CheckpointFaults, CallsOfASave) {
  Row row("save_calls", "the n-th system call of a save fails",
          "open, mkdir, fallocate, write, fdatasync, fsync, rename, unlink, ...: EIO, ENOSPC, short, EINTR, "
          "EAGAIN; once and "
          "for ever");
  // In memory, if there is room: what works takes a disk most of the time, and shows nothing here.
  std::error_code error;
  if (fs::space("/dev/shm", error).available > 32 << 20 && !error) directory_ = "/dev/shm" + name_;
  std::map<std::string, int64_t> calls;
  for (const IoEngineKind engine : engines()) {
    for (const Kind& kind : kKinds) {
      for (int64_t n = 0; n < kMostOperations; ++n) {
        fs::remove_all(directory_);
        save(1);
        bool met = true;
        const bool good = judge(
            kind,
            [&] {
              failing_calls::plan({kind.fault, n, kind.for_ever});
              try {
                save(2, {.directory = "", .catalogue = catalogue_, .engine = engine});
              } catch (...) {
                failing_calls::stop();
                throw;
              }
              met = failing_calls::stop() > 0;
            },
            row);
        ASSERT_TRUE(good) << kind.name << " at call " << n << ", " << failing_calls::first();
        ++calls[failing_calls::first()];
        if (!met) break;
      }
    }
  }
  for (const char* name : {"open", "openat", "mkdir", "fallocate", "pwrite", "fdatasync", "write", "fsync",
                           "rename", "renameat2", "unlinkat", "pread"})
    EXPECT_GT(calls[name], 0) << name << " was never the first to fail";
  for (const auto& [name, count] : calls) {
    if (!name.empty()) row.figure(name, count);
  }
  row.write();
  if (engines().size() == 1) GTEST_SKIP() << "io_uring is refused here";
}

// As a start does it: the newest that is whole; what cannot be read now is passed over.
TEST_F(CheckpointFaults, CallsOfALoad) {
  Row row("load_calls", "the n-th system call of a load fails",
          "open, pread: EIO, short, EINTR, EAGAIN; once and for ever");
  save(1);
  fs::rename(directory_ + "/step_00000001", directory_ + "/one");
  save(2);
  fs::rename(directory_ + "/one", directory_ + "/step_00000001");
  for (const Kind& kind : kKinds) {
    if (kind.fault == SimFault::kEnospc) continue;  // nothing that reads answers so
    for (int64_t n = 0; n < kMostOperations; ++n) {
      std::string outcome = "none";
      failing_calls::plan({kind.fault, n, kind.for_ever});
      try {
        for (const FoundCheckpoint& found : find_checkpoints(directory_)) {
          EXPECT_NE(found.manifest.has_value(), !found.problem.empty());
          if (!found.manifest) continue;
          try {
            outcome = std::to_string(verified_seed(found.path));
            break;
          } catch (const Error& error) {
            EXPECT_TRUE(error.code() == Exit::kIo) << error.report();
          }
        }
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), Exit::kIo) << error.report();
        outcome = "exit 21";
      }
      const bool met = failing_calls::stop() > 0;
      row.tried();
      row.count(outcome == "20" ? "the newest" : outcome == "10" ? "the one before" : outcome);
      const bool again =
          kind.fault == SimFault::kShort ||
          (!kind.for_ever && kind.fault != SimFault::kEagain && failing_calls::first() == "pread");
      EXPECT_TRUE(outcome == "20" || (met && !again)) << outcome << " " << failing_calls::first();
      EXPECT_EQ(checkpoints(), (std::map<int64_t, bool>{{1, true}, {2, true}}));
      ASSERT_FALSE(HasFailure()) << kind.name << " at call " << n << ", " << failing_calls::first();
      if (!met) break;
    }
  }
  row.write();
}

TEST_F(CheckpointFaults, AnInterruptedReservationIsMadeAgain) {
  save(1);
  for (int64_t n = 0; n < kMostOperations; ++n) {
    failing_calls::plan({SimFault::kEintr, n, false});
    try {
      save(2);
    } catch (const Error&) {
      EXPECT_NE(failing_calls::first(), "fallocate");
    }
    if (failing_calls::stop() == 0) return;
    fs::remove_all(directory_ + "/step_00000002");
  }
  FAIL() << "no end";
}

// What a start takes for a run without checkpoints has none.
TEST_F(CheckpointFaults, ADirectoryThatCannotBeReadIsNotEmpty) {
  save(1);
  failing_calls::plan({SimFault::kEio, 0, true});
  try {
    find_checkpoints(directory_);
    failing_calls::stop();
    FAIL() << "nothing was said";
  } catch (const Error& error) {
    failing_calls::stop();
    EXPECT_EQ(error.code(), Exit::kIo);
  }
  EXPECT_TRUE(find_checkpoints(directory_ + "/none").empty());
}

// A directory whose own name is not on the disk takes with it what was committed inside.
TEST_F(CheckpointFaults, EachNewDirectoryAboveIsSyncedBeforeTheCommit) {
  const std::string top = fs::temp_directory_path().string();
  failing_calls::names_made();
  Save save({.directory = directory_ + "/runs/new/checkpoints", .step = 1, .catalogue = catalogue_});
  std::vector<std::string> made = failing_calls::names_made();
  ASSERT_GE(made.size(), 8U);
  made.resize(8);
  const std::string &d = directory_, runs = d + "/runs", run = runs + "/new";
  EXPECT_EQ(made, (std::vector<std::string>{"mkdir " + d, "fsync " + top, "mkdir " + runs, "fsync " + d,
                                            "mkdir " + run, "fsync " + runs, "mkdir " + run + "/checkpoints",
                                            "fsync " + run}));
}

// It cannot be read now; nobody knows whether it can be tomorrow.
TEST_F(CheckpointFaults, WhatCannotBeReadGoesOnlyWhenEnoughNewerOnesAreWhole) {
  for (const int64_t step : {1, 2, 3}) {
    save(step);
    fs::rename(directory_ + "/step_0000000" + std::to_string(step),
               directory_ + "/kept" + std::to_string(step));
  }
  for (const int64_t step : {1, 2, 3})
    fs::rename(directory_ + "/kept" + std::to_string(step),
               directory_ + "/step_0000000" + std::to_string(step));
  fs::remove(directory_ + "/step_00000002/MANIFEST.json");
  retain_checkpoints(directory_, 2, 3, {});
  EXPECT_EQ(checkpoints(), (std::map<int64_t, bool>{{1, true}, {2, false}, {3, true}}));
  retain_checkpoints(directory_, 1, 3, {});
  EXPECT_EQ(checkpoints(), (std::map<int64_t, bool>{{3, true}}));
}

}  // namespace
}  // namespace lm
