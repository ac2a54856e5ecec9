#include "data/answer_scores.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "data/prompts.h"
#include "data/score_command.h"

namespace lm {
namespace {

TEST(AnswerScores, ExactMatchIgnoresBlanksAroundAlone) {
  EXPECT_EQ(exact_match(" 42\n", "42"), 1);
  EXPECT_EQ(exact_match("42", "\t42\r\n"), 1);
  EXPECT_EQ(exact_match("42.", "42"), 0);
  EXPECT_EQ(exact_match("Yes", "yes"), 0);
  EXPECT_EQ(exact_match("4 2", "42"), 0);
  EXPECT_EQ(exact_match("  ", ""), 1);
}

TEST(AnswerScores, TokenF1IsSquads) {
  EXPECT_DOUBLE_EQ(token_f1("The cat sat.", "a cat sat on it"), 2 / 3.0);
  EXPECT_DOUBLE_EQ(token_f1("An apple, the APPLE!", "apple"), 2 / 3.0);  // a word counts as often as in both
  EXPECT_DOUBLE_EQ(token_f1("apple", "an apple, the APPLE!"), 2 / 3.0);
  EXPECT_EQ(token_f1("don't", "dont"), 1);
  EXPECT_EQ(token_f1("the.", "An"), 1);  // both are empty
  EXPECT_EQ(token_f1("the", "cat"), 0);
  EXPECT_EQ(token_f1("dog", "cat"), 0);
  EXPECT_EQ(token_f1("theory another", "theory"), 2 / 3.0);  // no articles
}

TEST(AnswerScores, RougeLFollowsTheLongestCommonSubsequence) {
  EXPECT_DOUBLE_EQ(rouge_l("the cat was found under the bed", "The cat was under the bed."), 12 / 13.0);
  EXPECT_DOUBLE_EQ(rouge_l("police kill the gunman", "police killed the gunman"), 0.75);
  EXPECT_DOUBLE_EQ(rouge_l("the gunman kill police", "police killed the gunman"), 0.5);
  EXPECT_DOUBLE_EQ(rouge_l("a b c d", "a x c"), 4 / 7.0);
  EXPECT_EQ(rouge_l("don't", "DON T"), 1);
  EXPECT_EQ(rouge_l("", "cat"), 0);
  EXPECT_EQ(rouge_l("!!", "!!"), 0);
}

TEST(AnswerScores, AreMeansOfTheMetricsThatAreAskedFor) {
  const std::vector<ScoredAnswer> answers = {{"p", "four", "four"}, {"p", "five six", "five"}};
  const std::vector<AnswerMetric> asked = {AnswerMetric::kTokenF1, AnswerMetric::kExactMatch};
  EXPECT_EQ(score_answers(answers, asked),
            (NamedScores{{"exact_match", 0.5}, {"token_f1", (1 + 2 / 3.0) / 2}}));
}

CommandScores by_python(const std::string& text, int64_t seconds = 60) {
  const std::vector<ScoredAnswer> answers = {{"one\n?", "yes", "yes"}, {"two?", "no", "yes"}};
  return run_score_command({LM_TEST_PYTHON, "-c", text}, seconds, answers);
}

TEST(ScoreCommand, ReadsEveryAnswerAndGivesNumbers) {
  const CommandScores scores = by_python(
      "import json, sys\n"
      "rows = [json.loads(line) for line in sys.stdin]\n"
      "assert rows[0] == {'prompt': 'one\\n?', 'answer': 'yes', 'reference': 'yes'}\n"
      "print(json.dumps({'right': sum(r['answer'] == r['reference'] for r in rows) / 2, 'rows': "
      "len(rows)}))");
  EXPECT_EQ(scores.failure, "");
  EXPECT_EQ(scores.scores, (NamedScores{{"right", 0.5}, {"rows", 2}}));
  EXPECT_EQ(by_python("print(0.25)").scores, (NamedScores{{"command", 0.25}}));
}

TEST(ScoreCommand, AFailureIsNamed) {
  const auto failure = [](const CommandScores& scores, const std::string& part) {
    EXPECT_TRUE(scores.scores.empty());
    EXPECT_NE(scores.failure.find(part), std::string::npos) << scores.failure;
  };
  failure(by_python("raise SystemExit(3)"), "status 3");
  failure(by_python("import os; os.kill(os.getpid(), 9)"), "signal 9");
  failure(by_python("import time; time.sleep(1000)", 1), "killed after 1 s");
  // With both of its streams closed it is still limited.
  failure(by_python("import os, time; os.close(1); os.close(2); time.sleep(1000)", 1), "killed after 1 s");
  failure(run_score_command({"./no such program"}, 60, {}), "cannot be started: No such file");
  failure(run_score_command({"echo", "$((1 + 1))"}, 60, {}), "not a number");  // no shell
  failure(by_python("print('1 ' * 100000)"), "not a number");
}

TEST(ScoreCommand, OnlyFiniteNumbersWithPlainNamesAreTaken) {
  EXPECT_EQ(parse_scores("{\"a-b_1\": 2}\n").scores, (NamedScores{{"a-b_1", 2}}));
  for (const char* wrong :
       {"", "[1]", "{}", "{\"a\": \"1\"}", "{\"a\": {\"b\": 1}}", "{\"a/b\": 1}", "{\"\": 1}", "NaN", "1e999",
        "{\"a\": true}", "{\"a\": 1, \"rouge_l\": 1}", "1 2"}) {
    EXPECT_NE(parse_scores(wrong).failure, "") << wrong;
    EXPECT_TRUE(parse_scores(wrong).scores.empty()) << wrong;
  }
}

std::vector<ReferencePrompt> references(const std::string& text,
                                        const std::map<std::string, std::string>& columns = {}) {
  const std::filesystem::path path = std::filesystem::path(testing::TempDir()) / "references.jsonl";
  std::ofstream(path, std::ios::binary) << text;
  return read_references({path}, columns);
}

TEST(References, TheLastAnswerIsTheReference) {
  const auto rows = references(
      R"({"prompt": "a", "completion": "b", "system": "s"}

{"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}, {"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]}
{"prompt": [{"role": "user", "content": "g"}], "completion": [{"role": "assistant", "content": "h"}]}
)");
  ASSERT_EQ(rows.size(), 3u);
  EXPECT_EQ(rows[0].text + rows[0].system + rows[0].reference + rows[0].asked(), "asba");
  ASSERT_EQ(rows[1].messages.size(), 3u);
  EXPECT_EQ(rows[1].messages[1].content, "d");
  EXPECT_EQ(rows[1].asked() + rows[1].reference, "ef");
  EXPECT_TRUE(rows[1].place.ends_with("references.jsonl:3")) << rows[1].place;
  ASSERT_EQ(rows[2].messages.size(), 1u);
  EXPECT_EQ(rows[2].asked() + rows[2].reference, "gh");
  const auto named =
      references(R"({"question": "a", "answer": "b"})", {{"prompt", "question"}, {"completion", "answer"}});
  EXPECT_EQ(named.at(0).text + named.at(0).reference, "ab");
}

TEST(References, ARowWithoutOneIsNamedWithItsLine) {
  for (const char* wrong :
       {R"({"prompt": "a"})", R"({"completion": "a"})", R"([1])", R"({"prompt": "a", "completion": 1})",
        R"({"messages": [{"role": "user", "content": "a"}]})",
        R"({"messages": [{"role": "assistant", "content": "a"}]})",
        R"({"prompt": "a", "completion": "b", "messages": []})"}) {
    try {
      references(std::string("{\"prompt\": \"a\", \"completion\": \"b\"}\n") + wrong);
      ADD_FAILURE() << wrong;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kInput);
      EXPECT_NE(error.report().find("references.jsonl:2"), std::string::npos) << error.report();
    }
  }
}

}  // namespace
}  // namespace lm
