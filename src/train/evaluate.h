// The loss on held-out batches, with the weights as the last step left them. One thread, the rank's.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
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

// The same, unless it is to stop: nothing then. `stopped` is asked before each batch, and gives the same
// answer on all ranks.
std::optional<EvalResult> evaluate_unless(Rank& rank, const std::vector<Batch>& batches,
                                          const std::function<bool()>& stopped);

}  // namespace lm
