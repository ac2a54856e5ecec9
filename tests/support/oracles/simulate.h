// Test oracle: walks a step of all ranks of a run, rank by rank. Each rank has its own clocks; the ranks of a
// machine share its disks and its network; some ranks may be slower than others for a while. A collective
// ends for all ranks when the last one has entered it and the busiest link has carried its part. Tests and a
// benchmark compare the plan's estimate, which walks one rank, with it. Pure.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace lm {

// Ranks that are slower during a step, drawn anew for each.
struct Stragglers {
  uint64_t seed = 1;
  double share = 0;     // of the ranks
  double slowdown = 1;  // how many times as long their compute takes
};

struct Simulation {
  double seconds = 0;  // of a step, once pipelines are full
  // The longest that anything is busy in it: a rank's compute, a link of a rank or a machine, its disks. No
  // step with these lists can be shorter.
  double bound = 0;
};

// `machine`: a rank's share of one, as the plan was made for.
Simulation simulate_step(const PlanInputs& inputs, const Machine& machine, const Plan& plan,
                         const Stragglers& stragglers = {});

}  // namespace lm
