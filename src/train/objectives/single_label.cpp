// Classification into one of several classes: cross-entropy over a text's scores.
#include <algorithm>
#include <cmath>

#include "train/objectives/objective.h"

namespace lm {
namespace {

constexpr std::string_view kColumns[] = {"loss", "accuracy"};

size_t class_of(const SampleScores& sample) {
  return static_cast<size_t>(sample.label.front());
}
// The first of equal ones.
size_t chosen(const SampleScores& sample) {
  return static_cast<size_t>(std::ranges::max_element(sample.score) - sample.score.begin());
}

void score(std::span<const SampleScores> samples, std::span<double> columns) {
  for (const SampleScores& sample : samples) {
    const double largest = sample.score[chosen(sample)];
    double sum = 0;
    for (const float value : sample.score) sum += std::exp(value - largest);
    for (size_t i = 0; i < sample.score.size(); ++i)
      sample.gradient[i] = std::exp(sample.score[i] - largest) / sum;
    sample.gradient[class_of(sample)] -= 1;
    columns[0] += largest + std::log(sum) - sample.score[class_of(sample)];
    columns[1] += chosen(sample) == class_of(sample) ? 1 : 0;
  }
}

NamedColumns whole(std::span<const SampleScores> samples) {
  std::vector<ClassCounts> counts(samples.empty() ? 0 : samples.front().score.size());
  for (const SampleScores& sample : samples) {
    ++counts[chosen(sample)].predicted;
    ++counts[class_of(sample)].truth;
    if (chosen(sample) == class_of(sample)) ++counts[class_of(sample)].right;
  }
  return {{"f1", macro_f1(counts, false)}};
}

}  // namespace

const Objective objectives::single_label{.columns = kColumns, .score = score, .whole = whole};

}  // namespace lm
