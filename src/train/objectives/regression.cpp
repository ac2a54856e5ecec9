// Regression: the squared error of each score, the mean over them.
#include "train/objectives/objective.h"

namespace lm {
namespace {

constexpr std::string_view kColumns[] = {"loss"};

void score(std::span<const SampleScores> samples, std::span<double> columns) {
  for (const SampleScores& sample : samples) {
    const auto labels = static_cast<double>(sample.score.size());
    for (size_t i = 0; i < sample.score.size(); ++i) {
      const double error = static_cast<double>(sample.score[i]) - static_cast<double>(sample.label[i]);
      columns[0] += error * error / labels;
      sample.gradient[i] = 2 * error / labels;
    }
  }
}

}  // namespace

const Objective objectives::regression{.columns = kColumns, .score = score};

}  // namespace lm
