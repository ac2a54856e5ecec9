// The loss on the eval set, with the weights after the last step. Called by the rank's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/batch.h"
#include "train/rank.h"

namespace lm {

// Over the eval set: the sum of weight * nll divided by that of the targets' weights, as in training.
struct EvalResult {
  double loss = 0;
  int64_t target_tokens = 0;
};
EvalResult evaluate(Rank& rank, const std::vector<Batch>& batches);

// The same, or nullopt if it is stopped. `stopped` is called before each batch, and returns the same on all
// ranks.
std::optional<EvalResult> evaluate_unless(Rank& rank, const std::vector<Batch>& batches,
                                          const std::function<bool()>& stopped);

}  // namespace lm
