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

}  // namespace lm
