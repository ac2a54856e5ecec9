// What a step is made with, once: the model's passes (model/pass.h), the step's list (schedule.h) and its
// transfers (transfers.h), their dry run (plan/dry_run.h) and the executor (train/step.h) all read it. A
// plan makes it (plan/plan.h). A value.
#pragma once

#include <algorithm>
#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/batch.h"
#include "base/dtype.h"
#include "config/config.h"
#include "spec/block_layout.h"

namespace lm {

// What moves as one array: a unit's weights, a unit's gradient, a tile of optimizer state, a micro-batch's
// activations of a block; and where weights or gradients are in shards off the device, this rank's shard of a
// unit.
enum class Pool : uint8_t {
  kWeights,
  kGradients,
  kOptimizer,
  kActivations,
  kWeightShards,
  kGradientShards,
};
inline constexpr int kPools = 6;
const char* pool_name(Pool pool);
// Shards are the tier's side of a pool of whole arrays: a transfer of a whole array uses the shard in its own
// slot.
inline constexpr bool holds_shards(Pool pool) {
  return pool == Pool::kWeightShards || pool == Pool::kGradientShards;
}
// The pool of that pool's shards; nullopt where arrays are never in shards.
inline constexpr std::optional<Pool> shards_of(Pool pool) {
  if (pool == Pool::kWeights) return Pool::kWeightShards;
  if (pool == Pool::kGradients) return Pool::kGradientShards;
  return std::nullopt;
}

// A unit as the schedule sees it.
struct ScheduleUnit {
  int64_t block = 0;
  UnitRole role = UnitRole::kBody;
  // Its updates: tiles [first_tile, end_tile) of its block. State on the device is one tile.
  int64_t first_tile = 0, end_tile = 1;
  // Whether any of the block's state is off the device. Under global clipping the update of such a unit is
  // deferred: it runs under the next forward, before the unit's own.
  bool off_device = false;
  // Each rank has its shard of the weights alone. An update changes that where it lives (off the device: in
  // the shard's slot), and whoever uses the unit gathers it.
  bool in_shards = false;
  // No update changes what the weight pool moves of it (spec/block_layout.h, moves_frozen).
  bool frozen = false;

  int64_t tiles() const { return end_tile - first_tile; }
  auto operator<=>(const ScheduleUnit&) const = default;
};
// The units of a model (list_units says which), all state on the device.
std::vector<ScheduleUnit> schedule_units(int64_t layers, int64_t segments = 0);

// Places of block inputs off the device, and of what these blocks keep. The inputs of blocks before the first
// trained one take two places in turns: each ends when the next one has been computed, and no backward reads
// it.
struct InputPlaces {
  int64_t first_trained = 0;                                                   // block
  int64_t passing() const { return std::max<int64_t>(first_trained - 1, 0); }  // such inputs
  int64_t shared() const { return std::min<int64_t>(passing(), 2); }           // their places
  int64_t place(int64_t block) const {
    return block <= passing() ? (block - 1) % 2 : block - 1 - passing() + shared();
  }
};

struct PoolShape {
  // Per array: 1 = lives off the device and passes through slots; empty: none does. (What the CPU updates
  // where it lies, beside a GPU, is off the device and needs no slot.)
  std::vector<char> through_slots;
  int64_t slots = 0;

  bool holds(int64_t array) const {
    return static_cast<size_t>(array) < through_slots.size() &&
           through_slots[static_cast<size_t>(array)] != 0;
  }
  auto operator<=>(const PoolShape&) const = default;
};

// What decides the bits of a pass, whatever it passes.
struct Arithmetic {
  DType dtype = DType::kBF16;          // of the model: its weights and activations
  bool fp32_adapters = false;          // what is trained is fp32 whatever the model is
  Products products = Products::kF32;  // of fp32 matrices, on a GPU
  DType gradient_dtype = DType::kF32;
  int64_t row_chunk = 512;        // rows of logits at once
  bool round_rows = false;        // a micro-batch's tensors have rounded_rows (base/batch.h) of its tokens
  int64_t documents_at_once = 0;  // that attention is given on a GPU
  int threads = 1;                // compute threads (CPU)

  DType trained_dtype() const { return fp32_adapters ? DType::kF32 : dtype; }
  int64_t rows(int64_t tokens) const { return round_rows ? rounded_rows(tokens) : tokens; }
  auto operator<=>(const Arithmetic&) const = default;
};

struct StepConfig {
  // The list.
  std::vector<ScheduleUnit> units;
  int64_t micro_batches = 1;  // of a full step; of a list, its own
  bool tied = false;
  RecomputeChoice recompute = Recompute::kNone;  // never kAuto
  // Blocks that keep everything also keep what their norms give the mixers, which backward otherwise computes
  // again. Changes no bit.
  bool keep_norms = false;
  Clip clip = Clip::kGlobal;
  // Micro-batches that run through a unit before the next unit (G). 1 while weights are resident; off
  // the device each of their bytes crosses its link once per pass and group.
  int64_t group = 1;
  bool pending = false;  // of a list: the step before has left its deferred updates to this one
  int ranks = 1;         // that share the step
  bool sharded = false;  // a rank updates its shard of a unit alone, and weights are gathered
  int copies = 1;        // of every shard: so many groups of ranks have them all
  WholeTensors whole_tensors = WholeTensors::kNone;  // of which a shard has all or nothing
  // A block's gradient ends with its update, right after its backward: all micro-batches are one group.
  bool in_backward = false;
  // The gradient of a tied table is made when every block's has ended, in the memory of these and of the
  // activations: the head leaves it out, and its logits are computed once more. Only with updates inside
  // backward, and one backward of a step.
  bool defer_tied_gradient = false;

  // The embedding makes inputs for the layers, and its backward pass needs its weights.
  bool layer_inputs = false;
  // So does that of a prompt, whose rows it sums, and of an adapter of the embedding.
  bool embedding_adapted = false;
  // The first block with a trained tensor (full fine-tuning): blocks before it have no backward, keep nothing
  // for one, and their inputs end with their forward.
  int64_t first_trained = 0;

  // Transfers. Arrays: weights and gradients, and their shards, by unit; optimizer by tile, the blocks' tiles
  // one after another; activations place x group + micro-batch in its group, the place of the input of blocks
  // 1 .. L + 1, which has behind it what the block's level of recomputation keeps.
  std::array<PoolShape, kPools> pools = {};
  std::vector<int64_t> first_tile = {};  // of each block

  DeviceType device = DeviceType::kCpu;
  Arithmetic arithmetic = {};
  int64_t micro_rows = 0;  // of a micro-batch's tensors, at most
  bool weighted = false;   // targets have weights in the loss
  // The head gives each row's nll first, and then takes each row's weight: an objective makes it of the nll.
  bool two_phases = false;
  double router_aux_loss = 0;  // coefficient of the loss that balances experts (model/routers.h); 0: none
  uint64_t seed = 0;           // of dropouts
  double max_grad_norm = 1.0;
  int machine_ranks = 1;  // whose gradients are added up before those of other machines; 1: nobody's

  auto operator<=>(const StepConfig&) const = default;

  Sharding sharding() const { return {ranks, sharded ? ranks / copies : 1, whole_tensors}; }
  const ScheduleUnit& unit(int64_t u) const { return units[static_cast<size_t>(u)]; }
  // All gradients are there when the step is checked, and updates come then.
  bool updates_at_end() const { return clip == Clip::kGlobal && !in_backward; }
  bool deferred(int64_t u) const { return updates_at_end() && unit(u).off_device; }
  bool defers() const;                                         // any unit
  bool on_gpu() const { return device == DeviceType::kCuda; }  // compute: slots lie there
  // Ranks with GPUs exchange, gather and take norms in a stream beside compute.
  bool calls_beside() const { return on_gpu() && ranks > 1; }
  // A first backward is for the norm alone, a second one makes the gradients once more for the updates.
  bool two_pass_clip() const { return clip == Clip::kGlobal && in_backward; }
  // The first of two backwards leaves block inputs to the second.
  bool keeps_inputs() const { return two_pass_clip() && recompute.whole(); }
  int64_t segments() const;  // of a chunked head; 0: it is whole
  bool chunked_head() const { return segments() > 0; }

  const PoolShape& pool(Pool p) const { return pools[static_cast<size_t>(p)]; }
  PoolShape& pool(Pool p) { return pools[static_cast<size_t>(p)]; }
  bool uses_slots() const;  // any pool
  // Whether nothing of a step keeps the next one from being enqueued before this one's result is known.
  bool may_run_ahead() const {
    return ranks == 1 && clip == Clip::kGlobal && !two_pass_clip() && !uses_slots();
  }
  bool moves_shards() const {  // of weights or gradients, between their tier and slots of their own
    return pool(Pool::kWeightShards).slots + pool(Pool::kGradientShards).slots > 0;
  }
  // Activations: block inputs, with what their blocks keep.
  bool inputs_off_device() const { return pool(Pool::kActivations).slots > 0; }
  int64_t input_array(int64_t block, int64_t micro) const {
    return InputPlaces{first_trained}.place(block) * group + micro % group;
  }
  // The optimizer's array that an update of a unit's tile changes.
  int64_t tile_array(int64_t u, int64_t tile) const {
    return first_tile.empty() ? 0 : first_tile[static_cast<size_t>(unit(u).block)] + tile;
  }
};

}  // namespace lm
