#include "plan/traffic.h"

#include <algorithm>

#include "model/head_loss.h"

namespace lm {
namespace {

// Whether the shards of both are as long.
bool shared_alike(const Unit& a, const Unit& b) {
  return a.first == b.first && a.elements == b.elements && a.linear == b.linear &&
         std::ranges::equal(a.borders, b.borders);
}

}  // namespace

double Collective::mean_sent(int ranks) const {
  const double all = ranks, each = machine_ranks;
  const bool inside = reach == Reach::kMachine || reach == Reach::kGroup;
  const double times = inside                 ? (each - 1) / each
                       : reach == Reach::kAll ? (all - 1) / all
                                              : (all / each - 1) / all;
  return static_cast<double>(bytes) * times;
}

double Collective::between_share(const World& world) const {
  if (reach != Reach::kAll) return reach == Reach::kMachines || reach == Reach::kCopies ? 1 : 0;
  return static_cast<double>(world.ranks - world.ranks_per_node()) / (world.ranks - 1);
}

Traffic::Traffic(const ModelLayout& layout, const NumericsPlan& numerics, const PlacementPlan& placement,
                 const World& world)
    : ranks_(placement.ranks),
      machine_ranks_(numerics.two_levels() ? numerics.machine_ranks : 1),
      neighbours_(world.nodes > 1 && world.by_machine ? world.ranks_per_node() : 1),
      sharding_(placement.sharding()),
      weight_shards_(placement.pool(Pool::kWeights).shards),
      weight_bytes_(static_cast<int64_t>(dtype_size(numerics.trained_dtype()))),
      gradient_bytes_(static_cast<int64_t>(dtype_size(numerics.gradient_dtype))),
      units_(share(layout.units(placement.head_segments() > 0), placement)) {}

std::vector<Traffic::SharedUnit> Traffic::share(const std::vector<Unit>& units,
                                                const PlacementPlan& placement) const {
  std::vector<SharedUnit> out;
  const Unit* last = nullptr;
  for (const Unit& unit : units) {
    SharedUnit& shared = out.emplace_back();
    shared = {.elements = unit.elements,
              .frozen_bytes = unit.common_bytes(),
              .frozen = placement.frozen_array(std::ssize(out) - 1)};
    if (ranks_ == 1 || unit.elements == 0) continue;
    if (last != nullptr && shared_alike(unit, *last)) {
      const SharedUnit& before = out[static_cast<size_t>(last - units.data())];
      shared.shard = before.shard, shared.part = before.part;
    } else {
      shared.shard = longest_shard(unit, sharding_), shared.part = longest_part(unit, sharding_);
    }
    last = &unit;
  }
  return out;
}

Collective Traffic::scalars(int64_t bytes) const {
  return {.kind = Collective::Kind::kVotes, .bytes = ranks_ * bytes, .shard = bytes};
}

Collective Traffic::of_unit(Collective::Kind kind, const SharedUnit& unit, int64_t element_bytes) const {
  return {.kind = kind,
          .bytes = unit.elements * element_bytes,
          .shard = unit.part * element_bytes,
          .copies = sharding_.copies()};
}

Collective Traffic::in_group(Collective::Kind kind, const SharedUnit& unit, int64_t element_bytes) const {
  Collective call = of_unit(kind, unit, element_bytes);
  if (sharding_.group == ranks_) return call;
  call.reach = Collective::Reach::kGroup;
  call.shard = unit.shard * element_bytes;
  call.machine_ranks = sharding_.group;
  call.copies = 1;
  return call;
}

std::vector<Collective> Traffic::stop_vote() const {
  return in_levels(scalars(1));
}

std::vector<Collective> Traffic::in_levels(const Collective& call) const {
  if (call.reduce_scatter || call.reach != Collective::Reach::kAll || neighbours_ == 1) return {call};
  Collective machines = call, machine = call;
  machines.machine_ranks = machine.machine_ranks = neighbours_;
  machines.reach = Collective::Reach::kMachines, machine.reach = Collective::Reach::kMachine;
  return {machines, machine};
}

std::vector<Collective> Traffic::of(const Operation& op) const {
  std::vector<Collective> calls;
  for (const Collective& call : calls_of(op)) {
    for (const Collective& level : in_levels(call)) calls.push_back(level);
  }
  return calls;
}

std::vector<Collective> Traffic::calls_of(const Operation& op) const {
  using Kind = Collective::Kind;
  if (ranks_ == 1) return {};
  if (op.kind == OperationKind::kCheck) return {scalars(sizeof(LossSums))};
  if (op.kind == OperationKind::kFetch) {
    if (op.pool != Pool::kWeights || weight_shards_ == 1) return {};
    const SharedUnit& unit = units_[static_cast<size_t>(op.array)];
    if (!unit.frozen) return {in_group(Kind::kWeights, unit, weight_bytes_)};
    const bool all = weight_shards_ == ranks_;
    return {{.kind = Kind::kWeights,
             .reach = all ? Collective::Reach::kAll : Collective::Reach::kGroup,
             .bytes = unit.frozen_bytes,
             .shard = frozen_shard_of(unit.frozen_bytes, 0, weight_shards_).elements,
             .machine_ranks = all ? 1 : weight_shards_}};
  }
  const SharedUnit& unit = units_[static_cast<size_t>(op.unit)];
  if (is_transfer(op) || unit.elements == 0) return {};
  if (op.kind == OperationKind::kGather) return {in_group(Kind::kWeights, unit, weight_bytes_)};
  if (op.kind == OperationKind::kReduceScatter) {
    Collective sums = of_unit(Kind::kGradients, unit, gradient_bytes_);
    if (sharding_.group > 1) sums.reach = Collective::Reach::kCopies, sums.machine_ranks = sharding_.group;
    std::vector<Collective> calls = reduce_scatter_of(unit);
    if (sharding_.copies() > 1) calls.push_back(sums);
    return calls;
  }
  if (op.kind != OperationKind::kNorm || sharding_.group == 1) return {};
  Collective norms = in_group(Kind::kVotes, unit, sizeof(double));  // one of each granule
  norms.bytes /= kGranule, norms.shard /= kGranule;
  return {norms};
}

std::vector<Collective> Traffic::reduce_scatter_of(const SharedUnit& unit) const {
  Collective all = of_unit(Collective::Kind::kGradients, unit, gradient_bytes_);
  all.reduce_scatter = true;
  if (machine_ranks_ == 1) return {all};
  Collective machines = of_unit(Collective::Kind::kGradients, unit, sizeof(float));  // sums
  machines.reduce_scatter = true;
  all.machine_ranks = machines.machine_ranks = machine_ranks_;
  all.reach = Collective::Reach::kMachine, machines.reach = Collective::Reach::kMachines;
  return {all, machines};
}

double CollectiveTime::seconds() const {
  return fixed + std::max(inside, between);
}

CollectiveTime collective_time(const Collective& call, const World& world, const RankLinks& links) {
  // The longest shard's: no rank sends or receives more.
  const auto each = static_cast<double>(call.shard);
  const int here = world.ranks_per_node(), inside = here - 1, outside = world.ranks - here;
  if (call.reach == Collective::Reach::kMachine)  // of a reduce_scatter one call for each machine's shards
    return {.inside = each * inside * world.nodes / links.inside,
            .fixed = (call.reduce_scatter ? world.nodes : 1) * links.call_seconds};
  if (call.reach == Collective::Reach::kGroup)
    return {.inside = each * inside / links.inside, .fixed = links.call_seconds};
  if (call.reach == Collective::Reach::kMachines || call.reach == Collective::Reach::kCopies)
    return {.between = each * here * (world.nodes - 1) / links.between,
            .fixed = links.call_seconds + (world.nodes - 1) * links.message_seconds};
  CollectiveTime out{.inside = each * inside / links.inside,
                     .fixed = links.call_seconds + outside * links.message_seconds};
  if (outside > 0) out.between = each * outside * here / links.between;
  return out;
}

RankTraffic traffic_of(const Traffic& traffic, const StepSchedule& step, const World& world,
                       const RankLinks& links) {
  RankTraffic out;
  if (world.ranks == 1) return out;
  double between = 0;
  const auto add = [&](const Collective& call) {
    const double bytes = call.mean_sent(world.ranks);
    between += bytes * call.between_share(world);
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
  for (const Collective& call : traffic.stop_vote()) add(call);
  out.between_share = between / out.bytes();
  return out;
}

}  // namespace lm
