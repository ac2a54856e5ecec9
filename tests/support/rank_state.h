// The state of a rank that trains, as a source.
#pragma once

#include "tests/support/move_state.h"
#include "train/live_state.h"
#include "train/rank.h"

namespace lm {

// Valid until the next step. Completes deferred updates first.
inline LiveState rank_state(Rank& rank) {
  rank.step().flush();
  return LiveState(rank.weights(), &rank.optimizer(), rank.context().stream);
}

}  // namespace lm
