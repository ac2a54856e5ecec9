// What a run may take of each tier of memory: the machine's capacity and the configuration's budget. Pure.
#pragma once

#include "plan/sizes.h"

namespace lm {

struct TierSpace {
  bool there = false;                  // the machine has the tier, and the configuration lets a run use it
  Budget budget = {};                  // the part of the capacity to plan for
  int64_t capacity = 0, free_now = 0;  // bytes; 0: not known
};
TierSpace tier_space(const PlanInput& in, TierId tier);

// The bytes of `capacity` that a budget allows; more than any plan needs if neither says a number.
int64_t spend(const Budget& budget, int64_t capacity);

}  // namespace lm
