// Which level of recomputation (RecomputeChoice) a plan takes where train.recompute = "auto". Numerics have
// chosen the micro-batch, and with it whether saved activations fit as a whole. No level changes a bit: it is
// part of the placement, and may depend on how fast the machine is and on what is free. Pure.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/placement.h"

namespace lm {

// What is compared, from the most that is kept to the least.
std::vector<RecomputeChoice> recompute_levels();

// `plan` has the numerics' level. Of the levels with which all of it fits the one of the shortest estimated
// step; of equal ones the level that keeps more. Nothing where that is the numerics', and where nothing is
// compared: where the plan keeps everything and moves nothing, recomputation would only add work.
struct LevelChoice {
  SizedPlan plan;
  Choice choice;  // of train.recompute, with its reason
};
std::optional<LevelChoice> choose_recompute_level(const PlanInput& in, const SizedPlan& plan);

// With the outputs of norms kept, too (StepConfig::keep_norms): where train.recompute = "auto", a GPU has all
// activations and nothing moves, what is free holds them, and the estimated step is shorter. Else nothing.
std::optional<LevelChoice> choose_kept_norms(const PlanInput& in, const SizedPlan& plan);

// For the plan's table: the level, and what the saved activations are with it.
std::string recompute_text(const RecomputeChoice& recompute);
std::string saved_text(const RecomputeChoice& recompute, bool keep_norms);

}  // namespace lm
