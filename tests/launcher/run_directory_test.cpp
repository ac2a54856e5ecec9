#include "launcher/door/run_directory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "config/config_print.h"
#include "config/config_toml.h"
#include "launcher/status.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

class RunDirectory : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "lmlaunch-run-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    config_ = parse_config("model.path = \"m\"\ndata.train = [\"t\"]\n", "c.toml");
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& name, const std::string& text) { std::ofstream(root_ + "/" + name) << text; }
  int code() {
    try {
      check_run_directory(root_, config_);
      return 0;
    } catch (const Error& error) {
      return static_cast<int>(error.code());
    }
  }
  std::string root_;
  Config config_;
};

TEST_F(RunDirectory, NewEmptyAndBarelyBegunDirectoriesMayBeUsed) {
  check_run_directory(root_ + "/new", config_);
  EXPECT_FALSE(fs::exists(root_ + "/new"));
  EXPECT_EQ(code(), 0);
  write(".lock", "");
  write("status.json", "{}");
  write("log.txt", "x");
  EXPECT_EQ(code(), 0);
}

TEST_F(RunDirectory, TheSameNumericsStartAgainAndOthersAreRefused) {
  Config resolved = config_;
  resolved.train.micro_batch = 4;  // what auto became
  resolved.log.every = 99;         // reporting
  write("config.toml", print_config(resolved));
  write("metrics.jsonl", "{}\n");
  EXPECT_EQ(code(), 0);
  config_.optimizer.lr = 1.0;
  EXPECT_EQ(code(), 14);
}

TEST_F(RunDirectory, ARunThatFailedBeforeItsFirstStepStandsInNobodysWay) {
  write("config.toml", print_config(config_));
  config_.data.train = {"the right file"};
  EXPECT_EQ(code(), 14);
  RunStatus status;
  status.state = "failed";
  status.exit_code = 11;
  write_status(root_, status);
  EXPECT_EQ(code(), 0);
  status.step = 1;
  write_status(root_, status);
  EXPECT_EQ(code(), 14);
  status.step = 0;
  write_status(root_, status);
  write("metrics.jsonl", "{}\n");
  EXPECT_EQ(code(), 14);
}

TEST_F(RunDirectory, AFinishedRunIsNotOverwritten) {
  write("config.toml", print_config(config_));
  write("metrics.jsonl", "{}\n");
  RunStatus status;
  for (const char* unfinished : {"running", "stopped", "failed"}) {
    status.state = unfinished;
    status.step = 12;
    write_status(root_, status);
    EXPECT_EQ(code(), 0) << unfinished;
  }
  status.state = "done";
  status.exit_code = 0;
  write_status(root_, status);
  try {
    check_run_directory(root_, config_);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kIncompatible);
    const std::string report = error.report();
    const std::vector<std::string> parts = {"finished after step 12 at 20", "run.dir=", "rm -r " + root_,
                                            "kept: the directory, untouched"};
    for (const std::string& part : parts) {
      EXPECT_NE(report.find(part), std::string::npos) << part << " in\n" << report;
    }
  }
}

TEST_F(RunDirectory, FilesThatAreNoRunsAreLeftAlone) {
  write("thesis.tex", "x");
  EXPECT_EQ(code(), 14);
  write("config.toml", "[nonsense");
  EXPECT_EQ(code(), 14);
  root_ += "/thesis.tex";
  EXPECT_EQ(code(), 14);
  root_ = fs::path(root_).parent_path().string();
}

TEST_F(RunDirectory, ALockIsHeldOnceAndGivenBack) {
  {
    const RunLock lock(root_);
    EXPECT_EQ(lock.taken_over(), "");
    try {
      const RunLock second(root_);
      FAIL();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kInUse);
      EXPECT_NE(error.report().find("by process " + std::to_string(getpid())), std::string::npos);
    }
  }
  const RunLock again(root_);
  EXPECT_EQ(again.taken_over(), "");
}

TEST_F(RunDirectory, ALockSurvivesItsFirstHolderWhileAnotherDescriptorIsOpen) {
  std::optional<RunLock> lock(std::in_place, root_);
  const int inherited = dup(lock->fd());
  lock.reset();
  EXPECT_THROW(RunLock{root_}, Error);
  close(inherited);
  const RunLock again(root_);
}

TEST_F(RunDirectory, ARecordLeftByADeadRunIsTakenOverWithItsName) {
  write(
      ".lock",
      R"({"host":"h","boot_id":"b","pid":4242,"start_time":"1","started":"2026-01-01T00:00:00Z","run_id":"r"})");
  const RunLock lock(root_);
  EXPECT_NE(lock.taken_over().find("process 4242 on host h"), std::string::npos);
}

TEST_F(RunDirectory, AHostileLockFileIsNoOwner) {
  write(".lock", std::string(3000, '['));
  const RunLock lock(root_);
  EXPECT_EQ(lock.taken_over(), "");
  fs::remove(root_ + "/.lock");
  fs::create_symlink("/etc/passwd", root_ + "/.lock");
  EXPECT_THROW(RunLock{root_}, Error);
}

TEST(RunDirectoryName, DefaultsToTheConfigurationsName) {
  Config config;
  EXPECT_EQ(run_directory(config, "configs/a.b.toml"), "runs/a.b");
  config.run.dir = "/x";
  EXPECT_EQ(run_directory(config, "configs/a.b.toml"), "/x");
}

}  // namespace
}  // namespace lm
