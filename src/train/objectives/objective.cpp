#include "train/objectives/objective.h"

#include <algorithm>

#include "base/error.h"

namespace lm {

std::vector<float> target_weights(const Batch& batch) {
  std::vector<float> out;
  for (size_t t = 0; t < batch.target.size(); ++t) {
    if (batch.target[t] >= 0) out.push_back(batch.weight.empty() ? 1.0F : batch.weight[t]);
  }
  return out;
}

std::vector<SampleRows> rows_by_sample(const Batch& batch, std::span<const float> nll,
                                       std::span<float> weight) {
  std::vector<SampleRows> out;
  size_t row = 0;
  for (size_t d = 0; d + 1 < batch.document_start.size(); ++d) {
    const int32_t begin = batch.document_start[d], end = batch.document_start[d + 1];
    const auto count =
        static_cast<size_t>(std::count_if(batch.target.begin() + begin, batch.target.begin() + end,
                                          [](int32_t target) { return target >= 0; }));
    LM_CHECK(row + count <= nll.size(), "an nll for each target");
    out.push_back({.sample = batch.sample[static_cast<size_t>(begin)],
                   .nll = nll.subspan(row, count),
                   .weight = weight.empty() ? weight : weight.subspan(row, count)});
    row += count;
  }
  LM_CHECK(row == nll.size(), "a target for each nll");
  return out;
}

std::vector<SampleScores> scores_by_sample(const Batch& batch, std::span<const float> scores,
                                           std::span<double> gradients, size_t labels) {
  std::vector<SampleScores> out;
  const auto documents = static_cast<size_t>(batch.documents());
  const size_t width = batch.label.size() / documents;
  for (size_t d = 0; d < documents; ++d) {
    const auto begin = batch.target.begin() + batch.document_start[d],
               end = batch.target.begin() + batch.document_start[d + 1];
    if (std::none_of(begin, end, [](int32_t target) { return target >= 0; })) continue;
    const size_t first = out.size() * labels;
    LM_CHECK(first + labels <= scores.size() && scores.size() == gradients.size(), "scores of each document");
    out.push_back({.sample = batch.sample[static_cast<size_t>(batch.document_start[d])],
                   .score = scores.subspan(first, labels),
                   .label = std::span(batch.label).subspan(d * width, width),
                   .gradient = gradients.subspan(first, labels)});
  }
  LM_CHECK(out.size() * labels == scores.size(), "a document for each row of scores");
  return out;
}

double macro_f1(std::span<const ClassCounts> counts, bool empty_classes) {
  double sum = 0;
  int64_t classes = 0;
  for (const ClassCounts& one : counts) {
    const int64_t all = one.predicted + one.truth;
    if (all == 0 && !empty_classes) continue;
    ++classes;
    if (all > 0) sum += 2.0 * static_cast<double>(one.right) / static_cast<double>(all);
  }
  return classes > 0 ? sum / static_cast<double>(classes) : 0.0;
}

}  // namespace lm
