#include "data/prompts.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"

namespace lm {
namespace {

std::vector<AskedPrompt> read(const std::string& name, const std::string& text,
                              const std::string& system = "") {
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / name;
  std::ofstream(path, std::ios::binary) << text;
  return read_prompts(path, system);
}

std::string refusal(const std::string& text) {
  try {
    read("bad.jsonl", text);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kInput);
    return error.report();
  }
  return "accepted";
}

TEST(Prompts, EveryLineOfATextFileIsOneAsItStands) {
  const auto asked = read("asked.txt", "first\r\n\n  {\"prompt\": 1}\nlast");
  ASSERT_EQ(asked.size(), 3u);
  EXPECT_EQ(asked[0].text, "first");
  EXPECT_EQ(asked[1].text, "  {\"prompt\": 1}");
  EXPECT_EQ(asked[2].row.at("prompt"), "last");
  EXPECT_TRUE(asked[2].place.ends_with("asked.txt:4")) << asked[2].place;
}

TEST(Prompts, RowsOfJsonKeepTheirOtherFields) {
  const auto asked = read("asked.jsonl", R"({"id": 7, "prompt": "a"})"
                                         "\n"
                                         R"({"messages": [{"role": "user", "content": "b"}]})"
                                         "\n"
                                         R"({"prompt": [{"role": "user", "content": "c"}]})");
  ASSERT_EQ(asked.size(), 3u);
  EXPECT_EQ(asked[0].row.at("id"), 7);
  EXPECT_EQ(asked[0].text, "a");
  EXPECT_EQ(asked[1].messages.at(0).content, "b");
  EXPECT_EQ(asked[2].messages.at(0).content, "c");
}

TEST(Prompts, AConversationKeepsItsOwnSystemMessage) {
  const auto asked =
      read("system.jsonl",
           R"({"messages": [{"role": "system", "content": "own"}, {"role": "user", "content": "a"}]})"
           "\n"
           R"({"messages": [{"role": "user", "content": "b"}]})",
           "given");
  ASSERT_EQ(asked.size(), 2u);
  EXPECT_EQ(asked[0].messages.at(0).content, "own");
  ASSERT_EQ(asked[1].messages.size(), 2u);
  EXPECT_EQ(asked[1].messages[0].role, "system");
  EXPECT_EQ(asked[1].messages[0].content, "given");
}

TEST(Prompts, ARowThatCannotBeAskedIsNamedWithItsLine) {
  const std::string good = "{\"prompt\": \"a\"}\n";
  EXPECT_NE(refusal(good + "{\"text\": \"a\"}").find("bad.jsonl:2"), std::string::npos);
  EXPECT_NE(refusal("{\"prompt\": 5}").find("\"prompt\" is not a string"), std::string::npos);
  EXPECT_NE(refusal("{\"prompt\": \"a\", \"messages\": []}").find("are in one row"), std::string::npos);
  EXPECT_NE(refusal("{\"messages\": []}").find("not a list of messages"), std::string::npos);
  EXPECT_NE(refusal("{\"messages\": [{\"role\": \"user\"}]}").find("\"content\" is not a string"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"messages": [{"role": "assistant", "content": "a"}]})").find("the model's own"),
            std::string::npos);
  EXPECT_NE(refusal("[1]").find("not a JSON object"), std::string::npos);
  EXPECT_NE(refusal("\n\n").find("no prompt"), std::string::npos);
}

}  // namespace
}  // namespace lm
