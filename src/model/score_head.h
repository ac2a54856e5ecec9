// A head of scores: the final norm of the rows with a target, one of each text, and the product with the
// head's matrix [labels, H]. There are few rows and few labels: the scores exist in full, and whoever
// computes the loss gets them in fp32 and gives their gradient.
#pragma once

#include <functional>

#include "model/head_loss.h"

namespace lm {

// The scores [R, labels] fp32 of the rows that head_begin has normed, R > 0.
View score_rows(const Context& context, const Param& weight, const HeadRows& rows);

struct ScorePass {
  View x;   // [T, H]
  View dx;  // [T, H], becomes its gradient; undefined: nobody wants it
};
// Forward and backward. `take` replaces the scores by the gradient of the step's loss.
void score_head(const Context& context, const Head& head, const DeviceBatch& batch, const ScorePass& pass,
                const LossOptions& options, const std::function<void(const View& scores)>& take);

}  // namespace lm
