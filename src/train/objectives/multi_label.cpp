// Classification into any of several classes: binary cross-entropy of each score, the mean over them.
#include <algorithm>
#include <cmath>

#include "train/objectives/objective.h"

namespace lm {
namespace {

constexpr std::string_view kColumns[] = {"loss", "accuracy"};

void score(std::span<const SampleScores> samples, std::span<double> columns) {
  for (const SampleScores& sample : samples) {
    const auto labels = static_cast<double>(sample.score.size());
    bool right = true;  // all of them
    for (size_t i = 0; i < sample.score.size(); ++i) {
      const double value = sample.score[i], label = sample.label[i];
      // log(1 + e^value) - label * value, without overflow
      columns[0] += (std::max(value, 0.0) - label * value + std::log1p(std::exp(-std::abs(value)))) / labels;
      sample.gradient[i] = (1 / (1 + std::exp(-value)) - label) / labels;
      right = right && (value > 0) == (label > 0.5);
    }
    columns[1] += right ? 1 : 0;
  }
}

NamedColumns whole(std::span<const SampleScores> samples) {
  std::vector<ClassCounts> counts(samples.empty() ? 0 : samples.front().score.size());
  for (const SampleScores& sample : samples) {
    for (size_t i = 0; i < counts.size(); ++i) {
      const bool predicted = sample.score[i] > 0, truth = sample.label[i] > 0.5F;
      counts[i].predicted += predicted ? 1 : 0;
      counts[i].truth += truth ? 1 : 0;
      counts[i].right += predicted && truth ? 1 : 0;
    }
  }
  return {{"f1", macro_f1(counts, true)}};
}

}  // namespace

const Objective objectives::multi_label{.columns = kColumns, .score = score, .whole = whole};

}  // namespace lm
