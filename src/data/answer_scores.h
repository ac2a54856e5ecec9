// Scores of a generated answer against its reference. Case and punctuation are those of ASCII; characters
// beyond it are compared as they are. Pure.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "config/config.h"
#include "data/choices.h"

namespace lm {

struct ScoredAnswer {
  std::string prompt;  // as text: of a conversation its last message
  std::string answer;
  std::string reference;
};

// 1 if both are equal without the white space around them, else 0.
double exact_match(std::string_view answer, std::string_view reference);
// SQuAD's F1 over the words that both have: lower case, without punctuation and the articles a, an and the.
double token_f1(std::string_view answer, std::string_view reference);
// ROUGE-L: the F-measure of the longest common subsequence of lower-case [a-z0-9]+ tokens, without stemming.
double rouge_l(std::string_view answer, std::string_view reference);

// {"exact_match", mean over the answers}, ...: those of `metrics`, in the order of their names' table. At
// least one answer.
NamedScores score_answers(std::span<const ScoredAnswer> answers, std::span<const AnswerMetric> metrics);

}  // namespace lm
