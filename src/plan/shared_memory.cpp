#include "plan/shared_memory.h"

#include <algorithm>

#include "base/staging.h"
#include "plan/parallel_experts.h"

namespace lm {
namespace {

// Bytes of the longest message to every rank at once, and of the longest that adds up a part of each rank's.
struct Longest {
  int64_t gathered = 0, added = 0;
};

Longest longest_messages(const PlanInput& in, const PlacedPlan& plan) {
  const PlacementPlan& p = plan.placement;
  const Sharding sharding = p.sharding();
  const int64_t gradient = size_of(plan.numerics.gradient_dtype),
                weight = size_of(plan.numerics.trained_dtype());
  // An adapter is exported from its fp32 masters, which are gathered for that.
  const int64_t master = in.adapter != nullptr ? 4 : 0;
  Longest out;
  for (const Unit& unit : in.layout.units(p.head_segments() > 0)) {
    if (p.pool(Pool::kWeights).shards > 1)
      out.gathered = std::max(
          out.gathered, frozen_shard_of(unit.common_bytes(), 0, p.pool(Pool::kWeights).shards).elements);
    if (unit.elements == 0) continue;
    const int64_t part = longest_part(unit, sharding) * gradient;
    out.added = std::max(out.added, part);
    out.gathered =
        std::max(out.gathered, p.sharded ? longest_shard(unit, sharding) * std::max(weight, master) : part);
  }
  const ExpertShare& experts = in.layout.experts;
  const int64_t rows = expert_exchange_bytes(in.spec, experts, plan.numerics.dtype);
  out.added = std::max(out.added, rows / experts.ranks);
  return out;
}

}  // namespace

// As comm/shared_group.cpp lays its messages: each rank's memory has two halves, by turns. A gathered message
// begins at the half's beginning; of one that is added, each rank's part has a place of its own, and a rank
// reads its place of every other half.
int64_t shared_memory_bytes(const PlanInput& in, const PlacedPlan& plan) {
  const int ranks = in.world.ranks;
  if (in.world.nodes > 1) return kRankStagingBytes;
  if (!in.trains() || in.device == DeviceType::kCuda) return ranks * kRankStagingBytes;
  constexpr int64_t kHalf = kRankStagingBytes / 2, kPage = 4096;
  const int64_t room = kHalf / ranks / kPage * kPage;
  const Longest longest = longest_messages(in, plan);
  const int64_t gathered = std::min(longest.gathered, kHalf), added = std::min(longest.added, room);
  const auto beyond = [&](int place) {  // of that place, behind what is gathered
    return std::max<int64_t>(added - std::max<int64_t>(gathered - place * room, 0), 0);
  };
  int64_t own = gathered;
  for (int place = 0; place < ranks; ++place) own += beyond(place);
  const int64_t of_each_other = gathered + beyond(ranks - 1);
  return 2 * (own + (ranks - 1) * of_each_other);
}

}  // namespace lm
