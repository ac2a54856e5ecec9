#include "data/answer_scores.h"

#include <algorithm>
#include <cstdint>
#include <map>

#include "base/error.h"
#include "config/config_names.h"

namespace lm {
namespace {

bool is_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}
bool is_punctuation(char c) {
  return (c >= '!' && c <= '/') || (c >= ':' && c <= '@') || (c >= '[' && c <= '`') || (c >= '{' && c <= '~');
}
bool is_word(char lower) {
  return (lower >= 'a' && lower <= 'z') || (lower >= '0' && lower <= '9');
}
char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

std::string_view stripped(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

// The parts between characters for which `ends` holds; `omitted` ones leave no gap.
template <class Ends, class Omitted>
std::vector<std::string> parts(std::string_view text, Ends ends, Omitted omitted) {
  std::vector<std::string> out;
  std::string part;
  for (const char c : text) {
    const char small = lower(c);
    if (!ends(small)) {
      if (!omitted(small)) part += small;
    } else if (!part.empty()) {
      out.push_back(std::move(part));
      part.clear();
    }
  }
  if (!part.empty()) out.push_back(std::move(part));
  return out;
}

// Punctuation goes first: "the." is an article, too.
std::vector<std::string> squad_words(std::string_view text) {
  std::vector<std::string> words = parts(text, is_space, is_punctuation);
  std::erase_if(words, [](const std::string& word) { return word == "a" || word == "an" || word == "the"; });
  return words;
}

std::vector<std::string> rouge_tokens(std::string_view text) {
  return parts(
      text, [](char c) { return !is_word(c); }, [](char) { return false; });
}

double f_measure(int64_t common, size_t answer, size_t reference) {
  if (common == 0) return 0;
  const double precision = static_cast<double>(common) / static_cast<double>(answer),
               recall = static_cast<double>(common) / static_cast<double>(reference);
  return 2 * precision * recall / (precision + recall);
}

int64_t longest_common_subsequence(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  std::vector<int64_t> row(b.size() + 1, 0);  // of the tokens of `a` so far, by tokens of `b`
  for (const std::string& token : a) {
    int64_t diagonal = 0;
    for (size_t j = 1; j < row.size(); ++j) {
      const int64_t above = row[j];
      row[j] = token == b[j - 1] ? diagonal + 1 : std::max(above, row[j - 1]);
      diagonal = above;
    }
  }
  return row.back();
}

double score(AnswerMetric metric, const ScoredAnswer& one) {
  switch (metric) {
    case AnswerMetric::kExactMatch:
      return exact_match(one.answer, one.reference);
    case AnswerMetric::kTokenF1:
      return token_f1(one.answer, one.reference);
    case AnswerMetric::kRougeL:
      return rouge_l(one.answer, one.reference);
  }
  return 0;
}

}  // namespace

double exact_match(std::string_view answer, std::string_view reference) {
  return stripped(answer) == stripped(reference) ? 1 : 0;
}

double token_f1(std::string_view answer, std::string_view reference) {
  const std::vector<std::string> ours = squad_words(answer), theirs = squad_words(reference);
  // As SQuAD 2.0 scores questions without an answer.
  if (ours.empty() || theirs.empty()) return ours.empty() && theirs.empty() ? 1 : 0;
  std::map<std::string_view, int64_t> left;
  for (const std::string& word : theirs) ++left[word];
  int64_t common = 0;
  for (const std::string& word : ours) {
    const auto found = left.find(word);
    if (found != left.end() && found->second-- > 0) ++common;
  }
  return f_measure(common, ours.size(), theirs.size());
}

double rouge_l(std::string_view answer, std::string_view reference) {
  const std::vector<std::string> ours = rouge_tokens(answer), theirs = rouge_tokens(reference);
  return f_measure(longest_common_subsequence(ours, theirs), ours.size(), theirs.size());
}

NamedScores score_answers(std::span<const ScoredAnswer> answers, std::span<const AnswerMetric> metrics) {
  LM_CHECK(!answers.empty(), "a mean over answers");
  NamedScores out;
  for (const auto& metric : EnumNames<AnswerMetric>::kAll) {
    if (std::ranges::find(metrics, metric.value) == metrics.end()) continue;
    double sum = 0;
    for (const ScoredAnswer& one : answers) sum += score(metric.value, one);
    out.emplace_back(std::string(metric.name), sum / static_cast<double>(answers.size()));
  }
  return out;
}

}  // namespace lm
