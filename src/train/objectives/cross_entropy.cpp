// The weighted sum of nll. The data's weights are known before the pass.
#include "train/objectives/objective.h"

namespace lm {

const Objective objectives::cross_entropy{};

}  // namespace lm
