#include "plan/placement.h"
#include "plan/tier_space.h"

namespace lm {

namespace {

// Not where a first backward has to measure it while block inputs wait for the second one, nor where the
// embedding has more gradients than that of rows.
bool may_defer_tied_gradient(const PlanInput& in, bool in_backward) {
  const TensorPlace* const table = in.layout.blocks.front().find("embed");
  return in_backward && table != nullptr && !table->frozen && in.spec.tied &&
         in.spec.embedding.inputs.width == 0 && in.config.optimizer.clip != Clip::kGlobal;
}

std::vector<TierChoice> from_near_to_far(const PlanInput& in, bool in_backward) {
  const OffloadConfig offload = in.offload();
  TierChoice tier_choice{asked_tier(offload.optimizer, in.device), asked_tier(offload.gradients, in.device),
                         asked_tier(offload.weights, in.device), asked_tier(offload.activations, in.device),
                         in_backward};
  std::vector<TierChoice> out = {tier_choice};
  const auto with_deferred_tied_gradient = [&] {
    if (!may_defer_tied_gradient(in, in_backward)) return;
    out.push_back(tier_choice);
    out.back().defer_tied_gradient = true;
  };
  with_deferred_tied_gradient();
  const size_t near = out.size();
  const auto move = [&](OffloadTier choice, TierId& tier_id, TierId to) {
    if (choice != OffloadTier::kAuto) return;
    tier_id = to;
    out.push_back(tier_choice);
  };
  const auto move_all = [&](TierId to) {
    move(offload.optimizer, tier_choice.optimizer, to);
    if (in.adapter == nullptr && !in_backward) move(offload.gradients, tier_choice.gradients, to);
    move(offload.weights, tier_choice.weights, to);
    move(offload.activations, tier_choice.activations, to);
  };
  for (size_t t = tier_index(nearest_tier(in.device)) + 1; t < kTierCount; ++t)
    if (tier_space(in, static_cast<TierId>(t)).there) move_all(static_cast<TierId>(t));
  if (out.size() > near) with_deferred_tied_gradient();
  return out;
}

}  // namespace

std::vector<TierChoice> tier_candidates(const PlanInput& in) {
  const UpdateTime update = in.trains() ? in.config.train.update : UpdateTime::kAfter;
  if (update == UpdateTime::kInBackward) return from_near_to_far(in, true);
  std::vector<TierChoice> out = from_near_to_far(in, false);
  // Gradients of adapters are small, and some are told where to live.
  const bool may =
      in.adapter == nullptr && !is_off_device(asked_tier(in.offload().gradients, in.device), in.device);
  if (update == UpdateTime::kAfter || !may) return out;
  const std::vector<TierChoice> inside = from_near_to_far(in, true);
  const bool free = in.config.optimizer.clip != Clip::kGlobal;
  out.insert(free ? out.begin() + 1 : out.end(), inside.begin(), inside.end());
  return out;
}

}  // namespace lm
