// Where every array of a run lives and through which slots it passes, as a value: what placement.h fills, the
// sizes add up and the executor follows. Never changes a bit of the result. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/tier.h"
#include "config/config.h"
#include "schedule/step_config.h"
#include "schedule/timeline.h"
#include "spec/model_spec.h"

namespace lm {

enum class StateClass : uint8_t {
  kWeights,
  kFrozenWeights,
  kGradients,
  kOptimizer,  // the streams that the rule names, and the master
  kActivations,
};
inline constexpr int kStateClasses = 5;
const char* state_class_name(StateClass state);

// Slots and arrays off the device are multiples of this: whole checksum chunks (offload/store.h).
inline constexpr int64_t kSlotAlignment = 8192;

// What one place of a group of ranks has of an array.
struct PlaceBytes {
  int place = 0;
  int64_t bytes = 0;
};

// Arrays of one pool (schedule/transfers.h says which). Those that are not off the device live in its memory
// (on the CPU, where both are one tier, in host memory).
struct PoolPlan {
  TierId tier_id = TierId::kHost;  // the farthest tier of what is off the device
  std::vector<int64_t> bytes;      // of each array; 0: nothing
  std::vector<char> off_device;    // per array: 1 = offloaded
  // For tiers between the device and `tier_id`: of the arrays before this one, those off the device live in
  // that tier or in a nearer one.
  PerTier<int64_t> kept = {};
  // 1, or the ranks of a group: then what passes through slots is in shards. Each rank has its own in the
  // pool of shards (shards_of) if that has it off the device, and else in its device's memory.
  int shards = 1;
  std::vector<int64_t> shard_bytes = {};  // then the first rank's, of each array
  // Of arrays in shards of whole tensors, whose bytes above are the first rank's: every place with some.
  // Empty, or empty for an array: all ranks have as many.
  std::vector<std::vector<PlaceBytes>> places = {};
  int64_t slots = 0;  // 0: nothing passes through any
  int64_t slot_bytes = 0;
  TierId tier_id_of(size_t array) const {  // of an array off the device
    for (size_t t = 0; t < tier_index(tier_id); ++t)
      if (static_cast<int64_t>(array) < kept[t]) return static_cast<TierId>(t);
    return tier_id;
  }
  // Offloaded bytes of one rank; of sharded arrays, its shard.
  int64_t off_device_bytes() const;
  int64_t off_device_bytes(TierId at) const;
  int64_t off_device_bytes(Medium medium) const;
  // Total unsharded bytes of the offloaded arrays.
  int64_t whole_bytes() const;
};

// Sums of arrays by the places of a group. Of all blocks the first rank has most, of a tier's alone another
// one may: like blocks give their longest shard to one rank after the other (Unit::turn).
class BytesOfPlaces {
 public:
  BytesOfPlaces() = default;
  // Of the arrays that are off the device, as they are on it.
  explicit BytesOfPlaces(const PoolPlan& pool);
  // An array's bytes as they are on the device, or off it.
  void add(const PoolPlan& pool, size_t array, bool off_device) { count(pool, array, off_device, 1); }
  void remove(const PoolPlan& pool, size_t array, bool off_device) { count(pool, array, off_device, -1); }
  int64_t first() const { return common_ + beyond_.front(); }
  int64_t most() const;

 private:
  void count(const PoolPlan& pool, size_t array, bool off_device, int64_t times);
  int64_t common_ = 0;                                     // of every place
  std::vector<int64_t> beyond_ = std::vector<int64_t>(1);  // of each up to the last that has some
};

struct PlacementPlan {
  DeviceType device = DeviceType::kCpu;
  TierId tier_id[kStateClasses] = {};  // of each class's off-device part
  int optimizer_threads = 1;
  std::array<PoolPlan, kPools> pools;
  InputPlaces inputs;               // of blocks, in the pool of activations
  int64_t blocks = 0;               // of the model
  std::vector<int64_t> first_tile;  // of each block, and behind the last: optimizer arrays are tiles
  // Offsets for rank 0. For rank r add the start of its shard of the unit, and clip to the shard's end; a
  // shard of whole tensors is one tile.
  std::vector<int64_t> first_granule;                // of each tile, in its block
  std::vector<int64_t> granules;                     // of each tile
  int ranks = 1;                                     // that share the run
  bool sharded = false;                              // each has a shard of the optimizer's state
  int copies = 1;                                    // of every shard: so many groups of ranks have them all
  WholeTensors whole_tensors = WholeTensors::kNone;  // of which a shard has all or nothing
  // Of a chunked head: the first tile of each segment, of the final norm, and the end.
  std::vector<int64_t> segment_tiles;
  int64_t tile_granules = 0;  // of 4096 elements each; a unit's last may be shorter
  // With a GPU: bytes of the embedding's weights in pinned host memory, where the GPU reads rows and writes
  // updates in place; 0: on the device.
  int64_t embedding_in_host = 0;
  int64_t granule_bytes = 0;  // optimizer state of one, on average
  // With a GPU: state off it is updated by the CPU where it lies, in host memory or a slot there; else it
  // passes through the GPU. Then, per element, what an update brings from the GPU (gradient and weight) and
  // sends there (weight), and the host memory for that.
  bool update_on_host = false;
  // Between 0 and 1: of state in host memory the CPU updates this share where it lies, and the rest passes
  // through slots of the GPU beside it; 0: the CPU updates all. (Per tile: host_tiles.)
  double host_share = 0;
  std::vector<char> host_tiles = {};  // of the CPU, where it shares; empty: all off the device
  int64_t update_brings = 0, update_sends = 0;
  int64_t update_staging = 0;
  bool every_gemm_shape = false;  // the CPU's library may cache code for all shapes of the run
  // Updates inside backward: of each block, whether its gradient passes through the one slot that such blocks
  // share; empty: updates come after backward, or gradients have memory of their own.
  std::vector<char> gradients_in_slot;
  // A tied embedding's, too: it is made last, and the slot lies in the arena (model/pass.h).
  bool defer_tied_gradient = false;
  int64_t group = 1;  // micro-batches that pass a block before the next
  // The level of recomputation, if another one than the numerics' makes a shorter step (recompute_level.h).
  std::optional<RecomputeChoice> recompute = {};
  bool keep_norms = false;  // as in StepConfig: where all activations stay on the device and memory is left
  // Per array of the weight pool: 1 if its transfers are of frozen weights, such as the base of an adapter
  // (spec/block_layout.h).
  std::vector<char> frozen_arrays = {};
  // Ranks of a machine that have in common the frozen weights in host memory, but those in shards: on the CPU
  // where they are used, beside GPUs what is offloaded there.
  int frozen_sharers = 1;
  IoEngineChoice engine = IoEngineChoice::kAuto;
  int64_t io_block = 1 << 20;
  int io_depth = 32;
  int64_t io_timeout = 60;  // seconds
  bool verify = true;

  bool shares_updates() const { return update_on_host && !host_tiles.empty(); }
  bool host_updates(size_t tile) const {
    return update_on_host && pool(Pool::kOptimizer).off_device[tile] != 0 &&
           (host_tiles.empty() || host_tiles[tile] != 0);
  }
  // Whether slots have the length that any rank may need: of whole tensors another rank's shard of an array
  // may be longer than the first one's.
  bool slots_of_any_rank(Pool which) const {
    return sharded && whole_tensors != WholeTensors::kNone &&
           (which == Pool::kOptimizer || holds_shards(which));
  }
  // What the rank that has most in that tier has there beyond the first one.
  int64_t more_than_first(TierId tier) const;
  Sharding sharding() const { return {ranks, sharded ? ranks / copies : 1, whole_tensors}; }
  PoolPlan& pool(Pool p) { return pools[static_cast<size_t>(p)]; }
  const PoolPlan& pool(Pool p) const { return pools[static_cast<size_t>(p)]; }
  // Into how many segments the head is cut: 0 unless one of them lives off the device.
  int64_t head_segments() const;
  bool frozen_array(int64_t array) const {
    return static_cast<size_t>(array) < frozen_arrays.size() &&
           frozen_arrays[static_cast<size_t>(array)] != 0;
  }
  bool in_backward() const { return !gradients_in_slot.empty(); }
  // Of gradients, beside each other: of all blocks; with updates inside backward, of the longest one in the
  // slot and of those outside it. A table that is made last comes when no other is there, and is not counted.
  int64_t gradient_elements(const ModelLayout& layout) const;
  // The arrays of the pool that pass through slots, and its slots.
  PoolShape through(Pool which) const;
  // Bytes that cross each link.
  TimelineShape timeline() const;
  // Per array of a pool: whether it passes through slots. Host memory that the CPU works in needs none.
  std::vector<char> through_slots(Pool which) const;
  // The model's units with the tiles of their updates. One whose state is all on the device is updated at
  // once.
  std::vector<ScheduleUnit> units() const;
  // By how many ranks bytes of that tier are divided that belong to an array of the pool.
  int sharers(Pool which, size_t array, TierId tier) const {
    const bool common = which == Pool::kWeights && frozen_array(static_cast<int64_t>(array)) &&
                        pool(which).shards == 1 && tier == TierId::kHost;
    return common ? frozen_sharers : 1;
  }
  // Beside GPUs: offloaded bytes in host memory that ranks have in common, of all of them.
  int64_t common_in_host() const;
  // Whether some array lives in that tier; on any disk.
  bool uses(TierId tier) const;
  bool on_disk() const;
};

// What a pool's array is called in messages: "optimizer state of block 3, tile 2".
std::string array_name(const PlacementPlan& placement, const ModelLayout& layout, Pool pool, int64_t array);

}  // namespace lm
