#include "launcher/environment.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/error.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

class HubCache : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "lmlaunch-hub-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    environment_.hub_caches = {root_};
  }
  void TearDown() override { fs::remove_all(root_); }
  void write(const std::string& path, const std::string& text) {
    fs::create_directories(fs::path(root_ + "/" + path).parent_path());
    std::ofstream(root_ + "/" + path) << text;
  }
  std::string refusal(const std::string& path) {
    try {
      return "found " + resolve_model(path, environment_);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kInput);
      return error.report();
    }
  }
  std::string root_;
  Environment environment_;
};

TEST_F(HubCache, RefsMainNamesTheSnapshot) {
  write("models--org--name/refs/main", "abc123");
  write("models--org--name/snapshots/abc123/config.json", "{}");
  write("models--org--name/snapshots/older/config.json", "{}");
  EXPECT_EQ(resolve_model("org/name", environment_), root_ + "/models--org--name/snapshots/abc123");
}

TEST_F(HubCache, ASingleSnapshotNeedsNoRef) {
  write("models--org--name/snapshots/abc123/config.json", "{}");
  EXPECT_EQ(resolve_model("org/name", environment_), root_ + "/models--org--name/snapshots/abc123");
}

TEST_F(HubCache, ADirectoryIsTakenAsItIs) {
  write("here/config.json", "{}");
  EXPECT_EQ(resolve_model(root_ + "/here", environment_), root_ + "/here");
  write("empty/x", "");
  EXPECT_NE(refusal(root_ + "/empty").find("without a config.json"), std::string::npos);
}

TEST_F(HubCache, WhatIsMissingOrHostileIsRefused) {
  EXPECT_NE(refusal("org/name").find(root_ + "/models--org--name"), std::string::npos);
  EXPECT_NE(refusal("no-such-directory").find("does not exist"), std::string::npos);
  EXPECT_NE(refusal("../..").find("FILE-21"), std::string::npos);
  EXPECT_NE(refusal("org/../../etc").find("does not exist"), std::string::npos);
  write("evil/config.json", "{}");
  write("models--org--evil/refs/main", "../../evil");
  EXPECT_NE(refusal("org/evil").find("no complete snapshot"), std::string::npos);
  write("models--org--half/refs/main", "abc");
  fs::create_directories(root_ + "/models--org--half/snapshots/abc");  // a download that was cut off
  EXPECT_NE(refusal("org/half").find("no complete snapshot"), std::string::npos);
}

TEST(Environment, HubAndCacheDirectoriesFollowTheirVariables) {
  const auto set = [](const char* name, const char* value) {
    value ? setenv(name, value, 1) : unsetenv(name);
  };
  const char* const names[] = {"HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME", "LMLAUNCH_PYTHON"};
  std::vector<std::pair<const char*, std::string>> before;
  for (const char* name : names) before.emplace_back(name, std::getenv(name) ? std::getenv(name) : "");
  for (const char* name : names) set(name, nullptr);
  EXPECT_TRUE(read_environment().hub_caches.empty());
  EXPECT_EQ(read_environment().token_cache(), "");
  set("HOME", "/h");
  EXPECT_EQ(read_environment().hub_caches, std::vector<std::string>{"/h/.cache/huggingface/hub"});
  EXPECT_EQ(read_environment().token_cache(), "/h/.cache/lmlaunch/tokens");
  set("XDG_CACHE_HOME", "/x");
  EXPECT_EQ(read_environment().hub_caches, std::vector<std::string>{"/x/huggingface/hub"});
  set("HF_HOME", "/hf");
  EXPECT_EQ(read_environment().hub_caches, std::vector<std::string>{"/hf/hub"});
  set("HF_HUB_CACHE", "/hub");
  EXPECT_EQ(read_environment().hub_caches, std::vector<std::string>{"/hub"});
  set("LMLAUNCH_PYTHON", "/p/python");
  EXPECT_EQ(read_environment().python, "/p/python");
  EXPECT_EQ(read_environment().python_from, "LMLAUNCH_PYTHON");
  for (const auto& [name, value] : before) set(name, value.empty() ? nullptr : value.c_str());
}

}  // namespace
}  // namespace lm
