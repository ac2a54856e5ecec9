// A rank's memory and stores as a source of state (plan/state_catalogue.h). Reads on the stream that owns the
// bytes and changes nothing. Borrows everything for its lifetime, in which no step runs; used by the compute
// thread.
#pragma once

#include <optional>

#include "base/staging.h"
#include "optim/sharded_optimizer.h"
#include "plan/state_catalogue.h"
#include "weights/loans.h"

namespace lm {

class LiveState : public StateSource {
 public:
  // `optimizer` may be null: only weights.
  LiveState(WeightStore& weights, const ShardedOptimizer* optimizer, StreamView stream)
      : weights_(weights), optimizer_(optimizer), staging_(stream) {}
  void read(std::span<const StateEntry> entries, const Take& take) override;

 private:
  void read_tile(int64_t block, int64_t tile, std::span<const StateEntry> entries, const Take& take);
  void read_shard(const StateEntry& entry, const Take& take);
  // The unit's working weights of the block's elements [first, end); of weights in shards, which are of this
  // rank's, a copy in host memory. Valid until the next call.
  const std::byte* weights(int64_t unit, int64_t first, int64_t end);

  WeightStore& weights_;
  const ShardedOptimizer* optimizer_;
  static constexpr int64_t kReadAtOnce = int64_t{4} << 20;
  Staging staging_;
  std::vector<std::byte> shard_;
  std::optional<OpenUnit> open_;  // one at a time: offloaded units share one slot
};

}  // namespace lm
