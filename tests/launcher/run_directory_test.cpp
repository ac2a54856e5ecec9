#include "launcher/cli/run_directory.h"

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
#include "tests/faults/failing_calls.h"

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
      check_run_directory(root_, config_, model_);
      return 0;
    } catch (const Error& error) {
      return static_cast<int>(error.code());
    }
  }
  std::string refusal() {
    try {
      check_run_directory(root_, config_, model_);
      return "";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kIncompatible);
      return error.report();
    }
  }
  void checkpoint() {
    fs::create_directories(root_ + "/checkpoints/step_00000009");
    write("checkpoints/step_00000009/MANIFEST.json", "{}");
  }
  std::string root_;
  Config config_;
  ModelSpec model_ = parse_model_spec(
      R"({"model_type": "llama", "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 3})",
      "small");
};

TEST_F(RunDirectory, NewEmptyAndBarelyBegunDirectoriesMayBeUsed) {
  check_run_directory(root_ + "/new", config_, model_);
  EXPECT_FALSE(fs::exists(root_ + "/new"));
  EXPECT_EQ(code(), 0);
  write(".lock", "");
  write("status.json", "{}");
  write("log.txt", "x");
  EXPECT_EQ(code(), 0);
}

TEST_F(RunDirectory, EachNewDirectoryIsSynced) {
  failing_calls::names_made();
  const RunLock lock(root_ + "/runs/new/");
  std::vector<std::string> made = failing_calls::names_made();
  EXPECT_EQ(made, (std::vector<std::string>{"mkdir " + root_ + "/runs", "fsync " + root_,
                                            "mkdir " + root_ + "/runs/new", "fsync " + root_ + "/runs"}));
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

// A run records which modules its adapters have, by the names of its family, whichever projections that
// joins.
TEST_F(RunDirectory, AllLinearIsWhatItStandsForInTheModel) {
  model_.names.modules = {{"self_attn.qkv_proj", "attn.q", "attn.v"},
                          {"self_attn.o_proj", "attn.o"},
                          {"mlp.gate_up_proj", "mlp.gate", "mlp.up"},
                          {"mlp.down_proj", "mlp.down"}};
  config_.train.method = Method::kLora;
  Config resolved = config_;
  config_.lora.targets = {"all-linear"};
  resolved.lora.targets = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"};
  write("config.toml", print_config(resolved));
  write("metrics.jsonl", "{}\n");
  EXPECT_EQ(code(), 0);
  config_.lora.targets = {"gate_up_proj", "self_attn.o_proj", "down_proj"};
  EXPECT_EQ(code(), 14);
  config_.lora.targets.emplace_back("self_attn.qkv_proj");
  EXPECT_EQ(code(), 0);
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
    check_run_directory(root_, config_, model_);
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

TEST_F(RunDirectory, NoOverrideIsProposedForWhatACheckpointHasItsShapeBy) {
  config_.train.method = Method::kLora;
  config_.lora.targets = {"q_proj"};
  write("config.toml", print_config(config_));
  checkpoint();
  config_.optimizer.lr = 1.0;
  EXPECT_NE(refusal().find("add --override optimizer.lr"), std::string::npos) << refusal();
  config_.lora.r = 99;
  EXPECT_EQ(refusal().find("--override"), std::string::npos) << refusal();
  EXPECT_NE(refusal().find("it cannot resume from its checkpoint with another lora.r"), std::string::npos);
  config_.lora.r = LoraConfig().r;
  config_.data.loss_on = LossOn::kAll;
  EXPECT_EQ(refusal().find("--override"), std::string::npos) << refusal();
}

TEST_F(RunDirectory, WhatPissasPairsFollowFromIsNotOverridden) {
  config_.train.method = Method::kLora;
  config_.lora.targets = {"q_proj"};
  config_.lora.start = LoraStart::kPissa;
  write("config.toml", print_config(config_));
  write("metrics.jsonl", "{}\n");
  const std::vector<std::string> overridden = {"lora.start", "lora.alpha", "run.seed"};
  config_.lora.alpha = 5;
  EXPECT_EQ(check_run_directory(root_, config_, model_, overridden).size(), 1u)
      << "nothing counts from it yet";
  checkpoint();
  const auto refused = [&] {
    try {
      check_run_directory(root_, config_, model_, overridden);
    } catch (const Error& error) {
      return error.report().find("it cannot resume from its checkpoint with another ") != std::string::npos;
    }
    return false;
  };
  EXPECT_TRUE(refused());
  config_.lora.alpha = LoraConfig().alpha;
  config_.run.seed += 1;
  EXPECT_TRUE(refused());
  config_.run.seed -= 1;
  config_.lora.start = LoraStart::kZero;
  EXPECT_TRUE(refused());
  write("config.toml", print_config(config_));
  config_.lora.alpha = 5;
  EXPECT_FALSE(refused()) << "without such pairs alpha is a factor of the adapter";
}

TEST_F(RunDirectory, MoreStepsExtendAFinishedRun) {
  config_.train.steps = 12;
  write("config.toml", print_config(config_));
  checkpoint();
  RunStatus status;
  status.state = "stopped";
  status.step = 9;
  write_status(root_, status);
  config_.train.steps = 20;
  EXPECT_EQ(code(), 14);  // one that has not finished changes its schedule on the way: that is asked
  status.state = "done";
  status.step = 12;
  write_status(root_, status);
  const auto differences = check_run_directory(root_, config_, model_);
  ASSERT_EQ(differences.size(), 1u);
  EXPECT_EQ(differences[0].key, "train.steps");
  config_.train.steps = 11;
  EXPECT_EQ(code(), 14);
  EXPECT_EQ(refusal().find("--override"), std::string::npos) << refusal();
  config_.train.steps = 12;
  EXPECT_NE(refusal().find("a larger train.steps or train.epochs"), std::string::npos) << refusal();
  config_.train.steps = 20;
  config_.optimizer.lr = 1.0;
  EXPECT_NE(refusal().find("add --override optimizer.lr"), std::string::npos) << refusal();
  EXPECT_EQ(refusal().find("train.steps:"), std::string::npos) << refusal();
  EXPECT_EQ(check_run_directory(root_, config_, model_, {"optimizer.lr"}).size(), 2u);
  config_.optimizer.lr = OptimizerConfig().lr;
  // A start that failed before its first step has not made it another run.
  status.state = "failed";
  status.step = 0;
  write_status(root_, status);
  EXPECT_EQ(code(), 14);
  fs::create_directory(root_ + "/model");
  EXPECT_EQ(code(), 0);
  fs::remove_all(root_ + "/checkpoints");
  EXPECT_NE(refusal().find("without a checkpoint to resume from"), std::string::npos) << refusal();
}

TEST_F(RunDirectory, MoreEpochsExtendAFinishedRun) {
  config_.train.epochs = 1.5;
  write("config.toml", print_config(config_));
  checkpoint();
  RunStatus status;
  status.state = "done";
  write_status(root_, status);
  config_.train.epochs = 2;
  EXPECT_EQ(code(), 0);
  config_.train.epochs = 1;
  EXPECT_EQ(code(), 14);
  config_.train.epochs.reset();
  config_.train.steps = 100;  // more or fewer, nobody knows yet
  EXPECT_EQ(code(), 14);
}

TEST_F(RunDirectory, AConfigurationThatNeverTookAStepGoesWithTheNextRun) {
  write("config.toml", print_config(config_));
  write("numerics.json", "{}");
  RunStatus status;
  status.state = "failed";
  write_status(root_, status);
  const RunLock lock(root_);
  remove_leftovers(root_, lock);
  EXPECT_FALSE(fs::exists(root_ + "/config.toml"));
  EXPECT_FALSE(fs::exists(root_ + "/numerics.json"));
  write("config.toml", print_config(config_));
  write("metrics.jsonl", "{}\n");
  remove_leftovers(root_, lock);
  EXPECT_TRUE(fs::exists(root_ + "/config.toml"));
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

TEST_F(RunDirectory, TheFirstRankOfAJobThatFailsSaysHowForAll) {
  EXPECT_FALSE(told_end(root_, "job.1"));
  tell_end(root_, "job.1", {.state = "failed", .exit_code = 41, .reason = "error:hang", .checkpoint = ""});
  tell_end(root_, "job.1",
           {.state = "failed", .exit_code = 40, .reason = "killed:SIGKILL", .checkpoint = ""});
  const std::optional<RunStatus> told = told_end(root_, "job.1");
  ASSERT_TRUE(told);
  EXPECT_EQ(told->exit_code, 41);
  EXPECT_EQ(told->reason, "error:hang");
  EXPECT_EQ(told->state, "failed");
  EXPECT_FALSE(told_end(root_, "job.2"));
  write(".ended.job.3", "");  // being written
  EXPECT_FALSE(told_end(root_, "job.3"));
  EXPECT_EQ(code(), 0);  // of a job that is over
  const RunLock lock(root_);
  remove_leftovers(root_, lock);
  EXPECT_FALSE(told_end(root_, "job.1"));
}

TEST_F(RunDirectory, ALeaderHasLeftOnceItsLockIsInOrder) {
  EXPECT_TRUE(leader_left(root_));
  {
    const RunLock lock(root_);
    EXPECT_FALSE(leader_left(root_));
  }
  EXPECT_TRUE(leader_left(root_));
}

TEST(RunDirectoryName, DefaultsToTheConfigurationsName) {
  Config config;
  EXPECT_EQ(run_directory(config, "configs/a.b.toml"), "runs/a.b");
  config.run.dir = "/x";
  EXPECT_EQ(run_directory(config, "configs/a.b.toml"), "/x");
}

}  // namespace
}  // namespace lm
