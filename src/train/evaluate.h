// The loss on held-out batches, with the weights as the last step left them. One thread, the rank's.
#pragma once

#include <cstdint>
#include <vector>

#include "base/batch.h"
#include "train/rank.h"

namespace lm {

// Over the held-out set: the sum of weight * nll divided by that of the targets' weights, as in training.
struct EvalResult {
  double loss = 0;
  int64_t target_tokens = 0;
};
EvalResult evaluate(Rank& rank, const std::vector<Batch>& batches);

}  // namespace lm
