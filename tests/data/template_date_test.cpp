#include "data/template_date.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

namespace lm {
namespace {

namespace fs = std::filesystem;

class TemplateDate : public testing::Test {
 protected:
  void SetUp() override {
    char name[] = "/tmp/lm_date_XXXXXX";
    ASSERT_NE(::mkdtemp(name), nullptr);
    dir_ = name;
  }
  void TearDown() override { fs::remove_all(dir_); }
  void write(const std::string& name, const std::string& text) {
    fs::create_directories(fs::path(dir_ + "/" + name).parent_path());
    std::ofstream(dir_ + "/" + name) << text;
  }
  bool asks(const std::string& own = "") { return template_asks_for_date(own, dir_); }
  std::string dir_;
};

constexpr const char* kAsks = "{{ strftime_now('%d') }}";

TEST_F(TemplateDate, IsAskedForByTheTemplateThatIsUsed) {
  EXPECT_FALSE(asks());
  write("tokenizer_config.json", std::string(R"({"chat_template": ")") + kAsks + "\"}");
  EXPECT_TRUE(asks());
  write("chat_template.jinja", "{{ messages }}");  // which wins
  EXPECT_FALSE(asks());
  write("additional_chat_templates/tool_use.jinja", kAsks);
  EXPECT_TRUE(asks());
  write("own.jinja", "{{ messages }}");
  EXPECT_FALSE(asks(dir_ + "/own.jinja"));
  write("own.jinja", kAsks);
  EXPECT_TRUE(asks(dir_ + "/own.jinja"));
}

TEST_F(TemplateDate, IsFoundInAListAndUnderEscapes) {
  write(
      "tokenizer_config.json",
      R"({"chat_template": [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "{{ \u0073trftime_now('%d') }}"}]})");
  EXPECT_TRUE(asks());
  write("tokenizer_config.json",
        R"({"chat_template": [{"name": "strftime_now", "template": "x"}, 5], "why": "strftime_now"})");
  EXPECT_FALSE(asks());
}

TEST_F(TemplateDate, DamagedAndHugeFilesAskForNothing) {
  write("tokenizer_config.json", "{\"chat_template\": \"strftime_now");
  EXPECT_FALSE(asks());
  write("tokenizer_config.json", std::string(100000, '['));
  EXPECT_FALSE(asks());
  write("tokenizer_config.json", "5");
  EXPECT_FALSE(asks());
  write("chat_template.jinja", kAsks);
  fs::resize_file(dir_ + "/chat_template.jinja", int64_t{6} << 30);
  EXPECT_FALSE(asks());
}

}  // namespace
}  // namespace lm
