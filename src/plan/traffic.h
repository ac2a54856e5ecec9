// What the operations of a step send to other ranks, call by call, and the seconds that takes on the links
// between them. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "plan/plan.h"

namespace lm {

// A call that all ranks make: of an array each of them has a shard.
// Either each has made its shard and all get all of it, or (a reduce_scatter) each has an array of its own
// and adds up its shard of all of them.
struct Collective {
  enum class Kind : uint8_t { kGradients, kWeights, kVotes } kind = Kind::kVotes;
  // Among all; or in two levels, of a reduce_scatter first among the ranks of each machine, of every
  // machine's shards those of the ranks with the same places, then among machines, each rank with those of
  // its place on the others; of what is shared first among machines. Or in groups: the ranks of each share
  // its shards, or those with one place have parts of a shard, which has as many copies.
  enum class Reach : uint8_t { kAll, kMachine, kMachines, kGroup, kCopies } reach = Reach::kAll;
  bool reduce_scatter = false;
  int64_t bytes = 0;      // of the array
  int64_t shard = 0;      // the longest
  int machine_ranks = 1;  // in two levels; of a group
  int copies = 1;         // of a shard, whose parts are what is called a shard here

  // Bytes that a rank sends to all others together: the mean over all ranks, and the share of it that goes to
  // ranks of other machines.
  double mean_sent(int ranks) const;
  double between_share(const World& world) const;
};

class Traffic {
 public:
  Traffic(const ModelLayout& layout, const NumericsPlan& numerics, const PlacementPlan& placement,
          const World& world);
  // The calls of an operation, transfers among them; none with one rank.
  std::vector<Collective> of(const Operation& operation) const;
  // Before each step: whether to stop.
  std::vector<Collective> stop_vote() const;

 private:
  std::vector<Collective> calls_of(const Operation& operation) const;
  // What is shared, as it goes across machines.
  std::vector<Collective> in_levels(const Collective& call) const;
  Collective scalars(int64_t bytes) const;  // of each rank
  // What a call moves of a unit. Its longest shard is looked for once, as that takes long where no tensor is
  // divided and a unit has hundreds.
  struct SharedUnit {
    int64_t elements = 0, frozen_bytes = 0;  // that move
    bool frozen = false;                     // frozen weights are what is gathered
    int64_t shard = 0, part = 0;             // elements of the longest
  };
  std::vector<SharedUnit> share(const std::vector<Unit>& units, const PlacementPlan& placement) const;
  // Whose parts are each rank's; and whose shards are those of a group.
  Collective of_unit(Collective::Kind kind, const SharedUnit& unit, int64_t element_bytes) const;
  Collective in_group(Collective::Kind kind, const SharedUnit& unit, int64_t element_bytes) const;
  std::vector<Collective> reduce_scatter_of(const SharedUnit& unit) const;

  int ranks_;
  int machine_ranks_;  // whose gradients are added up first
  int neighbours_;     // ranks of a machine, where what is shared goes in two levels; else 1
  Sharding sharding_;
  int weight_shards_;                      // of a group; 1: each rank has all weights
  int64_t weight_bytes_, gradient_bytes_;  // of an element
  std::vector<SharedUnit> units_;
};

// Every rank sends to every other one: what each kind of link has to do, both at once, and what the call
// costs whatever it moves.
struct CollectiveTime {
  double inside = 0, between = 0, fixed = 0;
  double seconds() const;
};
CollectiveTime collective_time(const Collective& call, const World& world, const RankLinks& links);

// What a rank sends in a step's list with its transfers.
RankTraffic traffic_of(const Traffic& traffic, const StepSchedule& step, const World& world,
                       const RankLinks& links);

}  // namespace lm
