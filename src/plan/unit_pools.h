// The pools of weights and of gradients, whose arrays are units: what of them lives off the device, and what
// is in shards of the ranks. Inside src/plan, but for may_share_frozen.
#pragma once

#include <vector>

#include "plan/sizes.h"

namespace lm {

// Slots of a pool: one in use, one on its way in, one on its way out.
inline constexpr int64_t kSlots = 3;

// Of what a stage shards; with zero.group = "machine" a machine's ranks are a group.
Sharding sharding_of(const PlanInput& in);

// A pool of arrays, all of them on that tier, with at most so many slots.
PoolPlan make_pool(TierId tier_id, std::vector<int64_t> bytes, int64_t slots, DeviceType device);

// Whether gradients may be in shards. One that several micro-batches or groups add to is exchanged when it is
// whole, so that every stage adds in the same order: until then each rank needs all of it, unless all
// micro-batches pass a block together.
bool shards_gradients(const PlanInput& in, const NumericsPlan& numerics, const RecomputeChoice& recompute);

// Whole arrays, and a rank's shards of them: the first rank's. No other has more of any; of whole tensors
// none has more of all together.
struct UnitPools {
  PoolPlan whole, shards;
};
UnitPools weight_pools(const PlanInput& in, const NumericsPlan& numerics, TierId tier_id);
// `shards`: gradients are in shards.
UnitPools gradient_pools(const PlanInput& in, const NumericsPlan& numerics, TierId tier_id, bool shards);

// Whether the ranks of a machine have one copy of what is frozen, if they reach one another's memory. On the
// CPU compute uses it where it is, and GPUs fetch from there what is offloaded; several copies would have the
// same bytes, and take more memory and more reads of the files. Not where trained rows of tokens are written
// into a frozen table: every rank does that in its own time. For the worker, too, which makes that memory
// before there is a plan.
bool may_share_frozen(const PlanInputs& inputs, PlanPurpose purpose);
int frozen_sharers(const PlanInput& in);  // PlacementPlan::frozen_sharers
// PlacementPlan::frozen_arrays and embedding_in_host, with weights on that tier.
std::vector<char> frozen_arrays(const PlanInput& in, const NumericsPlan& numerics, TierId tier_id);
int64_t embedding_in_host(const PlanInput& in, const NumericsPlan& numerics, TierId tier_id);

// The pool whose arrays lie on a class's tier: where whole ones are in shards, that of the shards.
Pool tier_pool(const PlacementPlan& placement, Pool whole);

}  // namespace lm
