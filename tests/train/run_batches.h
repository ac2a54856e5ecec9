// The batches of offloaded_run's steps.
#pragma once

#include "base/batch.h"
#include "offloaded_run.h"

namespace lm::offloaded_run {

// Documents of unequal length: shapes vary from micro-batch to micro-batch.
inline StepBatches batches_of(int64_t micro_batches, int64_t step, int64_t vocab) {
  StepBatches out;
  for (int64_t m = 0; m < micro_batches; ++m) {
    Batch batch;
    const int64_t length = kLength - (step * 3 + m * 5) % 8;
    batch.document_start.push_back(0);
    for (int64_t d = 0; d < 2; ++d) {
      for (int64_t p = 0; p < length; ++p) {
        batch.token.push_back(static_cast<int32_t>((step * 131 + m * 977 + d * 79 + p * p * 31) % vocab));
        batch.position.push_back(static_cast<int32_t>(p));
        batch.sample.push_back(static_cast<int32_t>(d + 2 * m));
      }
      batch.document_start.push_back(static_cast<int32_t>((d + 1) * length));
    }
    for (size_t i = 0; i < batch.token.size(); ++i) {
      const bool last = (static_cast<int64_t>(i) + 1) % length == 0;
      batch.target.push_back(last ? -1 : batch.token[i + 1]);
      out.target_tokens += last ? 0 : 1;
    }
    out.micro.push_back(std::move(batch));
  }
  return out;
}

}  // namespace lm::offloaded_run
