#include "plan/placement.h"
#include "plan/tier_space.h"

namespace lm {

namespace {

// Not where a first backward has to measure it while block inputs wait for the second one, nor where the
// embedding has more gradients than that of rows.
bool may_make_table_last(const PlanInput& in, bool in_backward) {
  const TensorPlace* const table = in.layout.blocks.front().find("embed");
  return in_backward && table != nullptr && !table->frozen && in.spec.tied &&
         in.spec.embedding.inputs.width == 0 && in.config.optimizer.clip != Clip::kGlobal;
}

std::vector<HomeChoice> from_near_to_far(const PlanInput& in, bool in_backward) {
  const OffloadConfig offload = in.offload();
  HomeChoice homes{asked_home(offload.optimizer, in.device), asked_home(offload.gradients, in.device),
                   asked_home(offload.weights, in.device), asked_home(offload.activations, in.device),
                   in_backward};
  std::vector<HomeChoice> out = {homes};
  const auto with_table_last = [&] {
    if (!may_make_table_last(in, in_backward)) return;
    out.push_back(homes);
    out.back().table_last = true;
  };
  with_table_last();
  const size_t near = out.size();
  const auto move = [&](OffloadHome choice, Home& home, Home to) {
    if (choice != OffloadHome::kAuto) return;
    home = to;
    out.push_back(homes);
  };
  const auto move_all = [&](Home to) {
    move(offload.optimizer, homes.optimizer, to);
    if (in.adapter == nullptr && !in_backward) move(offload.gradients, homes.gradients, to);
    move(offload.weights, homes.weights, to);
    move(offload.activations, homes.activations, to);
  };
  for (size_t t = tier_index(nearest_tier(in.device)) + 1; t < kTierCount; ++t)
    if (tier_space(in, static_cast<Home>(t)).there) move_all(static_cast<Home>(t));
  if (out.size() > near) with_table_last();
  return out;
}

}  // namespace

std::vector<HomeChoice> home_candidates(const PlanInput& in) {
  const UpdateTime update = in.trains() ? in.config.train.update : UpdateTime::kAfter;
  if (update == UpdateTime::kInBackward) return from_near_to_far(in, true);
  std::vector<HomeChoice> out = from_near_to_far(in, false);
  // Gradients of adapters are small, and some are told where to live.
  const bool may =
      in.adapter == nullptr && !is_off_device(asked_home(in.offload().gradients, in.device), in.device);
  if (update == UpdateTime::kAfter || !may) return out;
  const std::vector<HomeChoice> inside = from_near_to_far(in, true);
  const bool free = in.config.optimizer.clip != Clip::kGlobal;
  out.insert(free ? out.begin() + 1 : out.end(), inside.begin(), inside.end());
  return out;
}

}  // namespace lm
