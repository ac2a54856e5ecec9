// The loss on the eval set, with the weights after the last step, and the accuracy of rows of choices. Called
// by the rank's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/batch.h"
#include "data/loader.h"
#include "train/metrics.h"
#include "train/rank.h"

namespace lm {

EvalResult evaluate(Rank& rank, const EvalBatches& set);

// The same, or nullopt if it is stopped. `stopped` is called before each batch, and returns the same on all
// ranks.
std::optional<EvalResult> evaluate_unless(Rank& rank, const EvalBatches& set,
                                          const std::function<bool()>& stopped);

}  // namespace lm
