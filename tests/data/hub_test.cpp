#include "data/hub.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

class Hub : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/lm_hub_XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
    caches_ = {.hub = {dir_ + "/hub"}, .datasets = {dir_ + "/datasets"}};
  }
  void TearDown() override { fs::remove_all(dir_); }

  void file(const std::string& path, const std::string& text = "x") {
    fs::create_directories(fs::path(dir_ + "/" + path).parent_path());
    std::ofstream(dir_ + "/" + path) << text;
  }
  // Relative to the temporary folder, joined by blanks.
  std::string found(const std::string& name) {
    DataSetName parsed;
    if (!parse_data_set_name(name, parsed)) return "no name";
    std::string out;
    for (const std::string& path : find_data_set(name, parsed, caches_))
      out += (out.empty() ? "" : " ") + path.substr(path.rfind('/') + 1);
    return out;
  }
  ErrorText refused(const std::string& name) {
    try {
      ADD_FAILURE() << found(name);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kInput);
      return error.text();
    }
    return {};
  }
  static bool has(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
  }
  std::string dir_;
  DataCaches caches_;
};

constexpr char kSnapshot[] = "hub/datasets--org--set/snapshots/abc/";

TEST_F(Hub, TakesTheSplitThatFileNamesTell) {
  file("hub/datasets--org--set/refs/main", "abc\n");
  for (const char* name : {"README.md", "dataset_infos.json", "data/train-00001-of-00002.parquet",
                           "data/train-00000-of-00002.parquet", "data/test-00000-of-00001.parquet",
                           "data/train_sft-00000-of-00001.parquet"})
    file(std::string(kSnapshot) + name);
  EXPECT_EQ(found("org/set"), "train-00000-of-00002.parquet train-00001-of-00002.parquet");
  EXPECT_EQ(found("org/set:test"), "test-00000-of-00001.parquet");
  EXPECT_EQ(found("org/set:train_sft"), "train_sft-00000-of-00001.parquet");
  const ErrorText none = refused("org/set:validation");
  EXPECT_TRUE(has(none.what, "no split \"validation\"; it has test, train, train_sft")) << none.what;
  EXPECT_TRUE(has(none.place, "datasets--org--set"));
}

// As huggingface_hub leaves a snapshot: names that link to blobs.
TEST_F(Hub, TakesTheNamesOfLinksNotThoseOfBlobs) {
  file("hub/datasets--org--set/refs/main", "abc");
  file("hub/datasets--org--set/blobs/0011");
  for (const char* name : {"main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet",
                           "socratic/train-00000-of-00001.parquet"}) {
    const fs::path link = dir_ + "/" + kSnapshot + name;
    fs::create_directories(link.parent_path());
    fs::create_symlink("../../../blobs/0011", link);
  }
  EXPECT_TRUE(has(refused("org/set").what, "several configurations: main, socratic"));
  EXPECT_EQ(found("org/set/main"), "train-00000-of-00001.parquet");
  EXPECT_EQ(found("org/set/main:test"), "test-00000-of-00001.parquet");
}

TEST_F(Hub, AsksWhichOfSeveralConfigurations) {
  file("hub/datasets--org--set/refs/main", "abc");
  for (const char* name : {"main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"})
    file(std::string(kSnapshot) + name);
  const ErrorText which = refused("org/set");
  EXPECT_TRUE(has(which.what, "several configurations: main, socratic"));
  EXPECT_TRUE(has(which.next, "org/set/main"));
  EXPECT_EQ(found("org/set/socratic"), "train-00000-of-00001.parquet");
  EXPECT_TRUE(has(refused("org/set/other").what, "no configuration \"other\"; it has main, socratic"));
}

TEST_F(Hub, TakesWordsInPathsForSplitsAndFilesWithoutForTraining) {
  file("hub/datasets--org--set/refs/main", "abc");
  file(std::string(kSnapshot) + "alpaca_data.jsonl");
  EXPECT_EQ(found("org/set"), "alpaca_data.jsonl");
  file(std::string(kSnapshot) + "dev/part.jsonl.gz");
  EXPECT_EQ(found("org/set:validation"), "part.jsonl.gz");
  EXPECT_TRUE(has(refused("org/set").what, "no split \"train\"; it has validation"));
}

TEST_F(Hub, ReadsWhatTheDatasetsLibraryLeaves) {
  const std::string made = "datasets/Org___ultra_chat/default/0.0.0/0123abcd/";
  for (const char* name :
       {"dataset_info.json", "ultra_chat-train-00001-of-00002.arrow", "ultra_chat-train-00000-of-00002.arrow",
        "ultra_chat-test_sft.arrow", "cache-012345.arrow"})
    file(made + name);
  EXPECT_EQ(found("Org/UltraChat"),
            "ultra_chat-train-00000-of-00002.arrow ultra_chat-train-00001-of-00002.arrow");
  EXPECT_EQ(found("Org/UltraChat:test_sft"), "ultra_chat-test_sft.arrow");
  EXPECT_EQ(found("Org/UltraChat/default"), found("Org/UltraChat"));
}

TEST_F(Hub, SaysWhereItLookedAndHowToDownload) {
  const ErrorText none = refused("org/none");
  EXPECT_TRUE(has(none.what, dir_ + "/hub/datasets--org--none, " + dir_ + "/datasets/org___none"))
      << none.what;
  EXPECT_TRUE(has(none.next, "lmlaunch fetch org/none --data"));
}

TEST_F(Hub, WhatIsAFileOrNoNameIsNotLookedUp) {
  for (const char* text :
       {"org/data.jsonl", "data", "a/b/c/d", "../up/x", "org/na me", "org/x.parquet", "org/*", "/a/b"})
    EXPECT_EQ(found(text), "no name") << text;
}

}  // namespace
}  // namespace lm
