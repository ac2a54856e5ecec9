// A tokenizer that gets more tokens, in the forms that its files have, and the spec of a model with them.
#include "launcher/tokenizer_file.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "config/config_toml.h"
#include "launcher/grown_model.h"

namespace lm {
namespace {

namespace fs = std::filesystem;

class Tokenizers : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "lm_tokenizer_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    directory_ = pattern;
  }
  void TearDown() override {
    std::error_code ignored;
    fs::remove_all(directory_, ignored);
  }
  void write(const std::string& name, const Json& json) {
    std::ofstream(directory_ + "/" + name) << json.dump();
  }
  Json read(const std::string& name) { return read_json_file(directory_ + "/out/" + name); }

  // Words 0 to 3, and added tokens with these ids.
  void write_words(const std::vector<int>& added) {
    Json list = Json::array();
    for (const int id : added) list.push_back({{"id", id}, {"content", "<" + std::to_string(id) + ">"}});
    write("tokenizer.json",
          {{"added_tokens", list},
           {"model", {{"type", "BPE"}, {"vocab", {{"a", 0}, {"b", 1}, {"c", 2}, {"d", 3}}}}}});
  }

  std::string directory_;
};

TEST_F(Tokenizers, NewTokensGetTheNumbersThatTheTokenizersLibraryGives) {
  for (const auto& [added, next] :
       std::vector<std::pair<std::vector<int>, int64_t>>{{{}, 4}, {{1, 2}, 4}, {{4, 5}, 6}, {{9}, 10}}) {
    write_words(added);
    EXPECT_EQ(TokenizerFile(directory_).next_id(), next);
  }
  write("tokenizer.json",
        {{"model", {{"vocab", Json::array({Json::array({"a", -1.5}), Json::array({"b", -2})})}}}});
  EXPECT_EQ(TokenizerFile(directory_).next_id(), 2) << "Unigram";
  EXPECT_EQ(TokenizerFile(directory_).id_of("b"), 1);
  write("tokenizer.json", {{"model", {{"vocab", {{"a", 0}, {"b", 2}}}}}});
  EXPECT_EQ(TokenizerFile(directory_).next_id(), std::nullopt) << "2 would be used twice";
}

TEST_F(Tokenizers, EveryFileThatListsTokensHasTheNewOne) {
  write_words({4});
  write("tokenizer_config.json",
        {{"added_tokens_decoder", {{"4", {{"content", "<4>"}}}}}, {"eos_token", "d"}});
  write("added_tokens.json", {{"<4>", 4}});
  fs::create_directories(directory_ + "/out");
  TokenizerFile tokenizer(directory_);
  tokenizer.add("<think>");
  EXPECT_EQ(tokenizer.id_of("<think>"), 5);
  tokenizer.write(directory_ + "/out");
  const Json token = read("tokenizer.json")["added_tokens"][1];
  EXPECT_EQ(token["id"], 5);
  EXPECT_EQ(token["normalized"], true);
  EXPECT_EQ(token["special"], false);
  const Json config = read("tokenizer_config.json");
  EXPECT_EQ(config["added_tokens_decoder"]["5"]["content"], "<think>");
  EXPECT_EQ(config["added_tokens_decoder"]["4"]["content"], "<4>");
  EXPECT_EQ(config["eos_token"], "d");
  EXPECT_EQ(read("added_tokens.json"), (Json{{"<4>", 4}, {"<think>", 5}}));
  EXPECT_EQ(TokenizerFile(directory_ + "/out").next_id(), 6);
}

Config with_tokens(const std::string& keys) {
  return parse_config("[data]\ntrain = [\"t\"]\n[model]\npath = \"m\"\n" + keys, "c.toml");
}

TEST_F(Tokenizers, AVocabularyGrowsWhereItHasNoRowsLeft) {
  write_words({4});
  const Config config = with_tokens("add_tokens = [\"x\", \"a\", \"y\"]\nnew_rows = \"b\"\n");
  ModelSpec full, padded;
  full.vocab = 5, padded.vocab = 9;
  const auto grown = grow_vocabulary(config, directory_, full),
             within = grow_vocabulary(config, directory_, padded);
  ASSERT_TRUE(grown && within);
  EXPECT_EQ(full.vocab, 7);
  EXPECT_EQ(padded.vocab, 9);
  for (const auto& one : {grown, within}) {
    ASSERT_EQ(one->tokens.size(), 2U) << "a is there";
    EXPECT_EQ(one->tokens[1].text, "y");
    EXPECT_EQ(one->tokens[1].id, 6);
    EXPECT_EQ(one->rows.first, 5);
    EXPECT_EQ(one->rows.end, 7);
    EXPECT_EQ(one->rows.like, 1);
  }
  // A table that ends before the tokenizer does has no rows for its last tokens either.
  ModelSpec shorter;
  shorter.vocab = 3;
  EXPECT_EQ(grow_vocabulary(config, directory_, shorter)->rows.first, 3);
  ModelSpec same;
  same.vocab = 5;
  EXPECT_FALSE(grow_vocabulary(with_tokens("add_tokens = [\"a\", \"<4>\"]\n"), directory_, same));
  EXPECT_EQ(same.vocab, 5);
}

TEST_F(Tokenizers, WhatCannotGrowIsRefused) {
  write_words({});
  ModelSpec spec;
  spec.vocab = 4;
  EXPECT_THROW(
      grow_vocabulary(with_tokens("add_tokens = [\"x\"]\nnew_rows = \"nobody\"\n"), directory_, spec), Error);
  EXPECT_THROW(grow_vocabulary(with_tokens("add_tokens = [\"x\"]\n"), "", spec), Error);
  spec.embedding.inputs.width = 8;
  EXPECT_THROW(grow_vocabulary(with_tokens("add_tokens = [\"x\"]\n"), directory_, spec), Error);
  EXPECT_EQ(spec.vocab, 4);
}

}  // namespace
}  // namespace lm
