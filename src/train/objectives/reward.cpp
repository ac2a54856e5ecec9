// A reward model (Bradley and Terry): -log sigmoid of a chosen text's score less that of the rejected one.
// The documents are pairs, the chosen one first.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "train/objectives/objective.h"

namespace lm {
namespace {

constexpr std::string_view kColumns[] = {"loss", "accuracy", "margin"};

void score(std::span<const SampleScores> samples, std::span<double> columns) {
  LM_CHECK(samples.size() % 2 == 0, "documents of a reward model are pairs");
  for (size_t i = 0; i < samples.size(); i += 2) {
    const SampleScores &chosen = samples[i], &rejected = samples[i + 1];
    const double margin =
        static_cast<double>(chosen.score.front()) - static_cast<double>(rejected.score.front());
    columns[0] += std::max(-margin, 0.0) + std::log1p(std::exp(-std::abs(margin)));
    columns[1] += margin > 0 ? 1 : 0;
    columns[2] += margin;
    const double slope = 1 / (1 + std::exp(margin));
    chosen.gradient.front() = -slope;
    rejected.gradient.front() = slope;
  }
}

}  // namespace

const Objective objectives::reward{.columns = kColumns, .score = score};

}  // namespace lm
