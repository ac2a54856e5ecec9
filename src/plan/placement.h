// Where each class of state lives: resolves offload.* into tiers, slots, tiles and groups. The device first;
// what does not fit moves to the next tier, one class after another in a fixed order, and of an `auto` class
// as many of the earliest arrays stay on the device as fit. Inside src/plan.
#pragma once

#include <limits>
#include <optional>
#include <vector>

#include "plan/sizes.h"

namespace lm {

// Tiers to try, the nearest first: for each class with `auto` one step further than in the candidate before.
// Updates inside backward, where `auto` may choose them, come before any other tier if they cost nothing, and
// last if clip = "global" wants a second backward for them. A tied table's gradient that is made last comes
// before what leaves the device, and beside all of that as the last resort: it computes the logits twice.
struct TierChoice {
  TierId optimizer, gradients, weights, activations;
  bool in_backward = false;
  bool defer_tied_gradient = false;
};
std::vector<TierChoice> tier_candidates(const PlanInput& in);

// Tiers, pools, tiles and group for `tier_choice`, with the fewest slots and nothing kept on the device of a
// class that has another tier; the rest is as in `start`, whose tiers are not set. No group is larger than
// `most_group`.
SizedPlan place(const PlanInput& in, const PlacedPlan& start, const TierChoice& tier_choice,
                int64_t most_group = std::numeric_limits<int64_t>::max());

// Whether the machine's capacities have room for one micro-batch of so many sequences in a step of its own.
// Where they have not, they have none for a step of larger ones or of more: most of a search ends here.
bool has_room_for_one(const PlanInput& in, const NumericsPlan& numerics, const TierChoice& tier_choice,
                      int64_t sequences);

// Spends what memory `plan` leaves: slots that stage optimizer state ahead, then arrays of `auto` classes
// that stay on the device; where the disk is too small for the rest, those arrays alone.
SizedPlan use_spare_memory(const PlanInput& in, const SizedPlan& plan);

// The nearest tiers whose memory fits the machine's capacities, then of these and farther ones the nearest
// that fit what is free now. What these have left is spent. `level`: of recomputation, if not the numerics'.
SizedPlan choose_placement(const PlanInput& in, const NumericsPlan& numerics,
                           std::optional<RecomputeChoice> level = {});

// Numerics, placement and sizes: a plan that says what fits, and not yet what a step takes (estimate.h).
// `estimated`: with the recomputation level of the shortest step; without it that of the numerics.
Plan place_plan(const PlanInput& in, bool estimated);

}  // namespace lm
