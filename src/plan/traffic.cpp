#include "plan/traffic.h"

#include <algorithm>

namespace lm {

int64_t Collective::shard_of(int rank) const {
  return std::clamp<int64_t>(bytes - rank * shard, 0, shard);
}

int64_t Collective::sent(int rank, int ranks) const {
  return exchange ? bytes - shard_of(rank) : shard_of(rank) * (ranks - 1);
}

Traffic::Traffic(const ModelLayout& layout, const NumericsPlan& numerics, const PlacementPlan& placement)
    : ranks_(placement.ranks),
      sharded_(placement.sharded),
      frozen_(placement.frozen_weights),
      weights_in_shards_(placement.pool(Pool::kWeights).shards > 1),
      weight_bytes_(static_cast<int64_t>(dtype_size(numerics.trained_dtype()))),
      gradient_bytes_(static_cast<int64_t>(dtype_size(numerics.gradient_dtype))),
      units_(layout.units(placement.head_segments() > 0)) {
  for (const Unit& unit : units_)
    trained_.push_back(layout.blocks[static_cast<size_t>(unit.block)].flat_elements > 0 ? 1 : 0);
}

Collective Traffic::scalars(int64_t bytes) const {
  return {.kind = Collective::Kind::kVotes, .exchange = false, .bytes = ranks_ * bytes, .shard = bytes};
}

Collective Traffic::of_unit(Collective::Kind kind, const Unit& unit, int64_t element_bytes) const {
  return {.kind = kind,
          .exchange = false,
          .bytes = unit.elements * element_bytes,
          .shard = lm::shard_of(unit, 0, ranks_).elements * element_bytes};
}

Collective Traffic::stop_vote() const {
  return scalars(1);
}

std::vector<Collective> Traffic::of(const Operation& op) const {
  using Kind = Collective::Kind;
  if (ranks_ == 1) return {};
  if (op.kind == OperationKind::kCheck) return {scalars(sizeof(double))};
  if (op.kind == OperationKind::kFetch) {
    if (op.pool != Pool::kWeights || !weights_in_shards_) return {};
    const Unit& unit = units_[static_cast<size_t>(op.array)];
    if (!frozen_) return {of_unit(Kind::kWeights, unit, weight_bytes_)};
    return {{.kind = Kind::kWeights,
             .exchange = false,
             .bytes = unit.frozen_bytes,
             .shard = frozen_shard_of(unit.frozen_bytes, 0, ranks_).elements}};
  }
  if (is_transfer(op) || trained_[static_cast<size_t>(op.unit)] == 0) return {};
  const Unit& unit = units_[static_cast<size_t>(op.unit)];
  if (op.kind == OperationKind::kGather) return {of_unit(Kind::kWeights, unit, weight_bytes_)};
  if (op.kind == OperationKind::kExchange) {
    Collective sums = of_unit(Kind::kGradients, unit, gradient_bytes_), exchange = sums;
    exchange.exchange = true;
    return sharded_ ? std::vector{exchange} : std::vector{exchange, sums};
  }
  if (op.kind != OperationKind::kNorm || !sharded_) return {};
  Collective norms = of_unit(Kind::kVotes, unit, sizeof(double));  // one of each granule
  norms.bytes /= kGranule, norms.shard /= kGranule;
  return {norms};
}

double CollectiveTime::seconds() const {
  return fixed + std::max(inside, between);
}

CollectiveTime collective_time(const Collective& call, const World& world, const RankLinks& links) {
  // The first rank has the longest shard: nobody sends or receives more.
  const auto each = static_cast<double>(call.shard);
  const int inside = world.ranks_per_node() - 1, outside = world.ranks - world.ranks_per_node();
  CollectiveTime out{.inside = each * inside / links.inside,
                     .fixed = links.call_seconds + outside * links.message_seconds};
  if (outside > 0) out.between = each * outside * world.ranks_per_node() / links.between;
  return out;
}

RankTraffic traffic_of(const Traffic& traffic, const StepSchedule& step, const World& world,
                       const RankLinks& links) {
  RankTraffic out;
  if (world.ranks == 1) return out;
  const auto add = [&](const Collective& call) {
    // Every byte goes to all ranks but one.
    const double bytes = static_cast<double>(call.bytes) * (1 - 1.0 / world.ranks);
    if (call.kind == Collective::Kind::kGradients) out.gradient_bytes += bytes;
    if (call.kind == Collective::Kind::kWeights) out.weight_bytes += bytes;
    if (call.kind == Collective::Kind::kVotes) out.vote_bytes += bytes;
    const CollectiveTime time = collective_time(call, world, links);
    out.seconds += time.seconds();
    out.inside_seconds += time.inside;
    out.between_seconds += time.between;
    ++out.calls;
  };
  for (const Operation& op : step.operations) {
    for (const Collective& call : traffic.of(op)) add(call);
  }
  add(traffic.stop_vote());
  out.between_share = static_cast<double>(world.ranks - world.ranks_per_node()) / (world.ranks - 1);
  return out;
}

}  // namespace lm
