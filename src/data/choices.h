// Rows of multiple choice in an evaluation set, and their accuracy as lm-evaluation-harness computes it: the
// choice is the ending with the largest log-likelihood, or with the largest one per character; the first of
// equal ones. Plain values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace lm {

// One row. Its endings are examples, one after another.
struct ChoiceGroup {
  int32_t right = 0;                     // index of the right ending
  std::vector<int32_t> characters = {};  // of each ending: what accuracy_norm divides by; > 0
};

// The indices of the endings chosen in a row.
struct Chosen {
  int32_t by_sum = 0, by_character = 0;
};
Chosen choose(const ChoiceGroup& group, std::span<const double> log_likelihoods);

struct ChoiceScores {
  std::vector<double> log_likelihoods = {};  // of each ending's tokens, of all groups in order
  double accuracy = 0, accuracy_norm = 0;    // the share of rows whose right ending is chosen
  int64_t rows = 0;
};
ChoiceScores score_choices(std::span<const ChoiceGroup> groups, std::vector<double> log_likelihoods);

// {"accuracy", ...}, {"accuracy_norm", ...}: as they are recorded.
using NamedScores = std::vector<std::pair<std::string, double>>;
NamedScores named_scores(const ChoiceScores& scores);

// ", accuracy 0.7310, accuracy_norm 0.7520 over 200 rows".
std::string describe(const ChoiceScores& scores);

}  // namespace lm
