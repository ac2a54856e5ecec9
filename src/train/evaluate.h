// The loss on the eval set, with the weights after the last step, and the accuracy of rows of choices. Called
// by the rank's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "base/batch.h"
#include "data/loader.h"
#include "train/rank.h"

namespace lm {

// Over the eval set: the sum of weight * nll divided by that of the targets' weights, as in training. Of rows
// of choices only the right endings count, as in training.
struct EvalResult {
  double loss = 0;
  int64_t target_tokens = 0;
  std::optional<ChoiceScores> choices = {};  // of a set of choices
  // Of a head of scores: the loss is the objective's, `target_tokens` counts examples, and these are its
  // columns and figures.
  bool scored = false;
  NamedColumns columns = {};
};
// Of a head of scores: "0.4312 over 200 examples, accuracy 0.8150, f1 0.8122".
std::string describe_scored(const EvalResult& result);

EvalResult evaluate(Rank& rank, const EvalBatches& set);

// The same, or nullopt if it is stopped. `stopped` is called before each batch, and returns the same on all
// ranks.
std::optional<EvalResult> evaluate_unless(Rank& rank, const EvalBatches& set,
                                          const std::function<bool()>& stopped);

}  // namespace lm
