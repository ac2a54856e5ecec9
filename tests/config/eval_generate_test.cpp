// [eval.generate]: a table whose name has a point, and what its keys exclude.
#include <gtest/gtest.h>

#include "base/error.h"
#include "config/config_print.h"
#include "config/config_toml.h"
#include "tests/config/failure.h"
#include "tests/support/same_config.h"

namespace lm {
namespace {

const std::string kEval = std::string(kLeast) + "eval = [\"e.jsonl\"]\n";

TEST(EvalGenerate, IsReadFromItsTableAndFromTheCommandLine) {
  const std::string file = kEval + R"([eval.generate]
data = ["asked.jsonl"]
max_tokens = 16
metrics = ["rouge_l"]
command = ["python3", "score.py"]
)";
  const Config config = parse_config(file, "c.toml", {"eval.generate.max_tokens=7"});
  EXPECT_EQ(config.eval.generate.data, std::vector<std::string>{"asked.jsonl"});
  EXPECT_EQ(config.eval.generate.max_tokens, 7);
  EXPECT_EQ(config.eval.generate.metrics, std::vector<AnswerMetric>{AnswerMetric::kRougeL});
  EXPECT_EQ(config.eval.generate.command, (std::vector<std::string>{"python3", "score.py"}));
  const Config inside = parse_config("eval = {generate = {data = [\"asked.jsonl\"]}}\n" + kEval, "c.toml");
  EXPECT_EQ(inside.eval.generate.data, config.eval.generate.data);
  EXPECT_EQ(inside.eval.generate.metrics.size(), 3u);
  const Config back = parse_config(print_config(config), "printed");
  EXPECT_TRUE(same_config(config, back)) << print_config(config);
}

TEST(EvalGenerate, AWrongNameIsPlacedInItsTable) {
  EXPECT_HAS(failure(kEval + "[eval.generate]\nmax_token = 1\n"),
             "c.toml:7:1: unknown key `max_token` in [eval.generate]; did you mean `max_tokens`?");
  EXPECT_HAS(failure(kEval + "[eval]\nmetrics = []\n"),
             "unknown key `metrics` in [eval]; it belongs to [eval.generate]");
  EXPECT_HAS(failure(kEval + "[eval.generat]\ndata = []\n"), "did you mean [eval.generate]?");
  EXPECT_HAS(failure(kEval + "[eval]\ngenerate = 3\n"), "`eval.generate`: expected a table");
  EXPECT_HAS(failure(kEval, {"eval.generate.max_token=1"}),
             "unknown key `eval.generate.max_token`; did you mean `max_tokens`?");
  EXPECT_HAS(failure(kEval, {"eval.generate.metrics=[\"rouge\"]"}),
             "\"exact_match\", \"token_f1\", \"rouge_l\"");
}

TEST(EvalGenerate, IsRefusedWhereItWouldDoNothing) {
  const std::vector<std::string> data = {"eval.generate.data=[\"a.jsonl\"]"};
  EXPECT_EQ(failure(kEval, data), "");
  EXPECT_EQ(failure(kLeast, {data[0], "data.eval_fraction=0.1"}), "");
  EXPECT_HAS(failure(kLeast, data), "set data.eval or data.eval_fraction");
  EXPECT_HAS(failure(kEval, {data[0], "eval.generate.metrics=[]"}), "scores no answer");
  EXPECT_EQ(failure(kEval, {data[0], "eval.generate.metrics=[]", "eval.generate.command=[\"c\"]"}), "");
  EXPECT_HAS(failure(kEval, {"eval.generate.command=[\"c\"]"}), "eval.generate.data, which names no file");
  EXPECT_HAS(failure(kEval, {data[0], "eval.generate.command=[\"\"]"}), "the name of the program is empty");
}

}  // namespace
}  // namespace lm
