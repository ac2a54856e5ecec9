// Test oracle: what each rank has and sends in a collective of the plan. The plan itself knows the mean
// alone.
#pragma once

#include <algorithm>

#include "plan/traffic.h"

namespace lm {

// Bytes of a rank's shard: that of its place in a group, or its part of one with copies.
inline int64_t shard_of(const Collective& call, int rank, int ranks) {
  if (call.reach == Collective::Reach::kGroup) rank %= call.machine_ranks, ranks = call.machine_ranks;
  const int at = Sharding{ranks, ranks / call.copies}.part(rank);
  return std::clamp<int64_t>(call.bytes - at * call.shard, 0, call.shard);
}

// Bytes of the shards of every machine's ranks with the same place as `rank`.
inline int64_t shards_of_place(const Collective& call, int rank, int ranks) {
  int64_t sum = 0;
  for (int r = rank % call.machine_ranks; r < ranks; r += call.machine_ranks) sum += shard_of(call, r, ranks);
  return sum;
}

// Bytes from `rank` to all others together.
inline int64_t sent_by(const Collective& call, int rank, int ranks) {
  using Reach = Collective::Reach;
  const int64_t own = shard_of(call, rank, ranks), machines = ranks / call.machine_ranks;
  if (call.reach == Reach::kGroup) return own * (call.machine_ranks - 1);
  if (call.reach == Reach::kCopies) return own * (machines - 1);
  const int64_t of_place = call.reach == Reach::kAll ? 0 : shards_of_place(call, rank, ranks);
  if (call.reach == Reach::kMachine)
    return call.reduce_scatter ? call.bytes - of_place : of_place * (call.machine_ranks - 1);
  if (call.reach == Reach::kMachines) return call.reduce_scatter ? of_place - own : own * (machines - 1);
  return call.reduce_scatter ? call.bytes - own : own * (ranks - 1);
}

}  // namespace lm
