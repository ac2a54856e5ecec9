// Numbers and lists that are refused: the bound that was exceeded is said, and what cannot be read is no
// file.
#include <gtest/gtest.h>

#include "config/config_toml.h"
#include "tests/config/failure.h"

namespace lm {
namespace {

TEST(Config, ABoundThatIsExceededIsSaid) {
  EXPECT_HAS(failure(std::string(kLeast), {"train.max_grad_norm=1e308"}),
             "expected a number greater than 0 and at most 1e+300, got 1e+308");
  EXPECT_HAS(failure(std::string(kLeast), {"train.steps=10000000000000000"}),
             "got 10000000000000000, which is more than 1000000000000000");
}

TEST(Config, AListThatIsBrokenOnTheCommandLineIsNoFile) {
  for (const char* broken :
       {R"(["a","b")", R"([ "a", "b]))", "[a.jsonl", R"(["a" "b"])", R"("a.jsonl)", "'a.jsonl"}) {
    const std::string text = failure(std::string(kLeast), {std::string("data.train=") + broken});
    EXPECT_HAS(text, "command line");
    EXPECT_HAS(text, std::string("got ") + broken);
  }
  EXPECT_HAS(failure(std::string(kLeast), {R"(data.train=["a","b")"}),
             "`data.train`: the list is not closed: it ends with ], got [\"a\",\"b\"");
  // A glob may begin with a bracket, and a file's name have one.
  for (const char* good : {"[0-9]*.jsonl", "a[1].jsonl", R"(["a","b"])", "a,b"})
    EXPECT_NO_THROW(parse_config(kLeast, "c.toml", {std::string("data.train=") + good})) << good;
}

TEST(Config, TokensOfAMicroBatchAndOfAStepAreBounded) {
  EXPECT_HAS(failure(std::string(kLeast) + "[train]\nmicro_batch = 1048576\nglobal_batch = 1048576\n"),
             "train.micro_batch = 1048576 x data.max_length = 2048: 2147483648 tokens, expected at most "
             "2147483647 at c.toml:6:15");
  EXPECT_HAS(
      failure(std::string(kLeast), {"train.global_batch=1000000000"}),
      "train.global_batch = 1000000000 x data.max_length = 2048: 2048000000000 tokens, expected at most "
      "17179869184 at command line");
  EXPECT_HAS(failure(std::string(kLeast),
                     {"data.max_length=16777216", "train.micro_batch=128", "train.global_batch=128"}),
             "train.micro_batch");
  EXPECT_NO_THROW(parse_config(kLeast, "c.toml", {"data.max_length=16777216", "train.global_batch=1024"}));
  EXPECT_NO_THROW(
      parse_config(kLeast, "c.toml", {"train.micro_batch=1000000", "train.global_batch=1000000"}));
}

}  // namespace
}  // namespace lm
