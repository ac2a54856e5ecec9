#include "train/evaluate.h"

namespace lm {

EvalResult evaluate(Rank& rank, const std::vector<Batch>& batches) {
  EvalResult result;
  double nll = 0;
  for (const Batch& batch : batches) {
    nll += rank.step().evaluate(batch);
    for (const int32_t target : batch.target) result.target_tokens += target >= 0;
  }
  result.loss = result.target_tokens > 0 ? nll / static_cast<double>(result.target_tokens) : 0.0;
  return result;
}

}  // namespace lm
