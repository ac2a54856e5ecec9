#include "data/choices.h"

#include <fmt/format.h>

#include <utility>

#include "base/error.h"

namespace lm {

Chosen choose(const ChoiceGroup& group, std::span<const double> log_likelihoods) {
  const auto per_character = [&](size_t ending) {
    return log_likelihoods[ending] / static_cast<double>(group.characters[ending]);
  };
  size_t by_sum = 0, by_character = 0;
  for (size_t ending = 1; ending < group.characters.size(); ++ending) {
    if (log_likelihoods[ending] > log_likelihoods[by_sum]) by_sum = ending;
    if (per_character(ending) > per_character(by_character)) by_character = ending;
  }
  return {static_cast<int32_t>(by_sum), static_cast<int32_t>(by_character)};
}

ChoiceScores score_choices(std::span<const ChoiceGroup> groups, std::vector<double> log_likelihoods) {
  ChoiceScores scores{.log_likelihoods = std::move(log_likelihoods), .rows = std::ssize(groups)};
  std::span<const double> rest = scores.log_likelihoods;
  int64_t right = 0, right_norm = 0;
  for (const ChoiceGroup& group : groups) {
    LM_CHECK(group.characters.size() <= rest.size(), "a log-likelihood for each ending");
    const Chosen chosen = choose(group, rest.first(group.characters.size()));
    rest = rest.subspan(group.characters.size());
    right += chosen.by_sum == group.right ? 1 : 0;
    right_norm += chosen.by_character == group.right ? 1 : 0;
  }
  LM_CHECK(rest.empty(), "an ending for each log-likelihood");
  if (scores.rows == 0) return scores;
  scores.accuracy = static_cast<double>(right) / static_cast<double>(scores.rows);
  scores.accuracy_norm = static_cast<double>(right_norm) / static_cast<double>(scores.rows);
  return scores;
}

NamedScores named_scores(const ChoiceScores& scores) {
  return {{"accuracy", scores.accuracy}, {"accuracy_norm", scores.accuracy_norm}};
}

std::string describe(const ChoiceScores& scores) {
  return fmt::format(", accuracy {:.4f}, accuracy_norm {:.4f} over {} rows", scores.accuracy,
                     scores.accuracy_norm, scores.rows);
}

}  // namespace lm
