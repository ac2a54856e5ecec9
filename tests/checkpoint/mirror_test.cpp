// Copies of checkpoints in a mirror: a visible copy is valid, whenever its writer was killed, and a slow
// mirror takes the newest.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <random>

#include "../faults/synthetic_state.h"
#include "../weights/support.h"
#include "checkpoint/mirror.h"
#include "checkpoint/save.h"

namespace lm {
namespace {

namespace fs = std::filesystem;
using namespace synthetic_state;
using test::TemporaryDirectory;

std::string save(const std::string& directory, int64_t step) {
  const StateCatalogue catalogue = small_catalogue();
  Save save({.directory = directory, .step = step, .catalogue = catalogue});
  write_state(catalogue, step, save);
  return save.commit(manifest_of(step, step));
}

// Steps of valid checkpoints, newest first. A visible one that is not valid fails the test.
std::vector<int64_t> valid(const std::string& directory) {
  std::vector<int64_t> out;
  for (const FoundCheckpoint& one : find_checkpoints(directory)) {
    EXPECT_TRUE(one.manifest) << one.path << ": " << one.problem;
    if (!one.manifest) continue;
    EXPECT_NO_THROW(CheckpointReader(one.path).verify()) << one.path;
    out.push_back(one.step);
  }
  return out;
}

const auto kNever = [] { return false; };

TEST(Mirror, ACopyIsTheCheckpoint) {
  const TemporaryDirectory local, mirror;
  const std::string from = save(local.path(), 3),
                    to = mirror.path() + "/" + fs::path(from).filename().string();
  EXPECT_TRUE(copy_checkpoint(from, mirror.path(), kNever));
  EXPECT_TRUE(copy_checkpoint(from, mirror.path(), kNever));  // replaces it
  EXPECT_EQ(valid(mirror.path()), std::vector<int64_t>{3});
  EXPECT_TRUE(interrupted_saves(mirror.path()).empty());
  EXPECT_EQ(manifest_text(read_manifest(from)), manifest_text(read_manifest(to)));
}

TEST(Mirror, ACopyThatIsStoppedOrDamagedLeavesNothing) {
  const TemporaryDirectory local, mirror;
  const std::string from = save(local.path(), 3);
  EXPECT_FALSE(copy_checkpoint(from, mirror.path(), [] { return true; }));
  const std::string file = from + "/" + read_manifest(from).files.front().name;
  {
    std::fstream damaged(file, std::ios::in | std::ios::out | std::ios::binary);
    damaged.seekp(700000);
    damaged.put('\x55').put('\x2a').put('\x13');
  }
  try {
    copy_checkpoint(from, mirror.path(), kNever);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kIntegrity);
  }
  EXPECT_TRUE(fs::is_empty(mirror.path()));
}

TEST(Mirror, NoKillLeavesAHalfCopy) {
  const TemporaryDirectory local, mirror;
  std::vector<std::string> from;
  for (int64_t step = 1; step <= 3; ++step) from.push_back(save(local.path(), step));
  std::mt19937_64 random(7);
  for (int kill_number = 0; kill_number < 50; ++kill_number) {
    const pid_t child = fork();
    if (child == 0) {
      for (size_t i = 0;; ++i) copy_checkpoint(from[i % from.size()], mirror.path(), kNever);
    }
    usleep(static_cast<useconds_t>(random() % 30000));
    kill(child, SIGKILL);
    ASSERT_EQ(waitpid(child, nullptr, 0), child);
    valid(mirror.path());
  }
  // What the kills have left goes with the next copy that is kept.
  EXPECT_TRUE(copy_checkpoint(from[2], mirror.path(), kNever));
  retain_checkpoints(mirror.path(), 1, 3, {});
  EXPECT_EQ(valid(mirror.path()), std::vector<int64_t>{3});
  EXPECT_TRUE(interrupted_saves(mirror.path()).empty());
}

TEST(Mirror, ASlowOneTakesTheNewestAndNamesWhatItNeeds) {
  const TemporaryDirectory local, mirror;
  std::vector<std::string> from;
  for (int64_t step = 1; step <= 3; ++step) from.push_back(save(local.path() + "/checkpoints", step));
  std::ofstream(local.path() + "/config.toml") << "x = 1\n";
  std::atomic<bool> begun = false, go = false;
  Mirror copies(
      {.run = local.path(),
       .directory = mirror.path() + "/run",
       .files = {"config.toml", "none.txt"},
       .keep = 1,
       .copy = [&](const std::string& one, const std::string& to, const std::function<bool()>& stopped) {
         begun = true;
         while (!go) usleep(1000);
         return copy_checkpoint(one, to, stopped);
       }});
  copies.add(from[0], 1, {});
  while (!begun) usleep(1000);
  EXPECT_EQ(copies.in_use(), std::vector<int64_t>{1});
  copies.add(from[1], 2, {});
  copies.add(from[2], 3, {});
  EXPECT_EQ(copies.in_use(), (std::vector<int64_t>{3, 1}));
  go = true;
  copies.wait([] {});
  EXPECT_TRUE(copies.in_use().empty());
  EXPECT_EQ(valid(mirror.path() + "/run/checkpoints"), std::vector<int64_t>{3});
  EXPECT_TRUE(fs::exists(mirror.path() + "/run/config.toml"));
}

TEST(Mirror, AFailureIsNoEnd) {
  const TemporaryDirectory local, mirror;
  const std::string from = save(local.path(), 1);
  std::ofstream(mirror.path() + "/run") << "a file where the directory would be\n";
  Mirror copies({.run = local.path(), .directory = mirror.path() + "/run"});
  copies.add(from, 1, {});
  copies.wait([] {});
  fs::remove(mirror.path() + "/run");
  copies.add(from, 1, {});
  copies.wait([] {});
  EXPECT_EQ(valid(mirror.path() + "/run/checkpoints"), std::vector<int64_t>{1});
}

}  // namespace
}  // namespace lm
