// The optimizer state of a rank and the update of a block. A tile is a range of granules of a block with its
// state tensors one after another: those of the rule, then the master (or its low half). Tiles on the device
// are in memory of this object, offloaded ones are fetched into slots of a store; with a GPU, the CPU may
// instead update offloaded tiles (host_update.h), in host memory of this object or in a store of host memory.
// The result does not depend, to the bit, on a tile's tier, length or updating processor. (With Muon a GPU's
// rank updates all tiles on the GPU.) Called by the compute thread; on a GPU the update is enqueued.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/arena.h"
#include "base/staging.h"
#include "config/config.h"
#include "kernels/kernels.h"
#include "offload/store.h"
#include "optim/host_update.h"
#include "optim/open_tile.h"
#include "optim/ranges.h"
#include "spec/block_layout.h"

namespace lm {

// The tiles of blocks and their placement; the default: each block is one tile on the device.
struct TileLayout {
  std::vector<int64_t> first_tile;     // of each block, and the end; empty: one tile per block
  std::vector<int64_t> first_granule;  // of each tile, in its block
  std::vector<int64_t> granules;       // of each tile, 0 for one that only other ranks have
  std::vector<char> off_device;        // per tile; empty: none
  std::vector<char> through_slots;  // per offloaded tile: in `store`; the others in this object's host memory
  Store* store = nullptr;           // borrowed; may be null
  // Per offloaded tile, where CPU and GPU share updates: the CPU's, which lie in this object's host memory;
  // empty: all are the CPU's, or none.
  std::vector<char> on_host = {};
};

// Where offloaded tiles are updated.
struct UpdateSite {
  bool host = false;  // on the CPU, in a run on a GPU; the other fields are used only then
  int threads = 1;
  std::span<std::byte> staging = {};  // pinned, as HostUpdate requires
};

struct OptimizerSetup {
  const ModelLayout& layout;
  const OptimizerConfig& config;
  DType weight_dtype = DType::kBF16;  // bf16 takes config.master; fp32 weights are their own master
  int64_t seed = 0;
  const Kernels& kernels;
  TileLayout tiles = {};
  DType gradient_dtype = DType::kF32;  // for a site on the host
  UpdateSite site = {};
  DeviceClock* clock = nullptr;  // borrowed; records the site's copies
};

struct UpdateInputs {
  std::byte* weights = nullptr;          // working weights of the block, or of the tile's unit
  const std::byte* gradients = nullptr;  // likewise
  DType gradient_dtype = DType::kF32;
  float gradient_scale = 1;                // clipping
  const StepDecision* decision = nullptr;  // on a GPU: in its place, and whether the step is skipped
  double lr = 0;
  int64_t step = 0;      // optimizer step, keys stochastic rounding
  bool ready = false;    // weights and gradients are complete: no enqueued work writes them
  int64_t first = 0;     // first element of the block in `weights` and `gradients`
  int64_t elements = 0;  // their number
};

class ShardedOptimizer {
 public:
  ShardedOptimizer(const OptimizerSetup& setup, StreamView stream);

  // Initialises the masters from the loaded weights (a split master's low halves start at zero). With fp32
  // masters `weights` must be complete. Tiles in the store are initialised at their first update. Each tile
  // is in one unit. Tiles that the host updates are copied through `staging`.
  void start(const Unit& unit, const std::byte* weights, Staging& staging);
  // Starts an update and counts it in t (skipped steps are not counted).
  void begin_update() { ++t_; }
  // The update that was begun last has turned out to be a skipped step's.
  void take_back_update() { --t_; }
  bool updates_on_host() const { return host_ != nullptr; }
  // Updates the whole block, or one of its tiles.
  void update(int64_t block, const UpdateInputs& inputs);
  void update_tile(int64_t block, int64_t tile, const UpdateInputs& inputs);
  int64_t tiles(int64_t block) const;
  int64_t t() const { return t_; }
  // Cancels an update that an error has ended.
  void abandon() {
    if (host_ != nullptr) host_->abandon();
  }

  // Reads a trainable tensor's fp32 masters into `out` (host memory, its elements), for LoRA's export;
  // complete on return. Tiles in the store must be on their tier (between steps, after a flush).
  void read_master(int64_t block, const TensorPlace& place, const std::byte* weights, float* out,
                   Staging& staging) const;

  // A tile's elements of the block's flat array, and its state outside of a step.
  TileRange range(int64_t block, int64_t tile) const;
  OpenTile open(int64_t block, int64_t tile) const;
  // Right after the tile's update, or at any time for one in this object's memory: take(stream, offset,
  // bytes) gets each state tensor's bytes in place, from byte `offset` of the block's on. They are in host
  // memory and complete, or in device memory and written by the compute stream.
  bool shows_host_memory(int64_t block, int64_t tile) const {
    return stream_.device == DeviceType::kCpu || on_host(index(block, tile));
  }
  using TakeStream = std::function<void(size_t stream, int64_t offset, std::span<const std::byte> bytes)>;
  void show(int64_t block, int64_t tile, const TakeStream& take) const;
  // Restores all of a tile's state from a checkpoint: fill(stream, offset, host memory) reads a state
  // tensor's bytes from byte `offset` of the block's on. Not while a schedule has slots filled; complete
  // after staging.finish().
  using FillStream = std::function<void(size_t stream, int64_t offset, std::span<std::byte> bytes)>;
  void restore(int64_t block, int64_t tile, Staging& staging, const FillStream& fill);
  void restore_updates(int64_t t) { t_ = t; }
  // The tile's array in the store; nullopt if it is in this object's memory.
  std::optional<int64_t> array(int64_t block, int64_t tile) const {
    const size_t i = index(block, tile);
    return through_slots(i) ? std::optional(static_cast<int64_t>(i)) : std::nullopt;
  }

 private:
  struct Tile : TileRange {
    const BlockLayout* block = nullptr;
    std::byte* data = nullptr;
  };
  const Kernels& table(StreamView stream) const {
    return stream.device == stream_.device ? kernels_ : kernels(stream.device);
  }
  size_t index(int64_t block, int64_t tile) const;
  bool through_slots(size_t index) const { return tiles_.through_slots[index] != 0; }
  bool on_host(size_t index) const {
    return host_ != nullptr && tiles_.off_device[index] != 0 &&
           (tiles_.on_host.empty() || tiles_.on_host[index] != 0);
  }
  // `data` is null for a tile in the store.
  Tile place(int64_t block, int64_t tile) const;
  // A state tensor of the tile: its address, its value for element `at` of the block, and its length.
  std::byte* part(const Tile& tile, size_t stream) const { return part(tile, stream, tile.first); }
  std::byte* part(const Tile& tile, size_t stream, int64_t at) const;
  int64_t part_bytes(const Tile& tile, size_t stream) const;
  // Updates elements [from, to) of the block, which are in the tile.
  void apply(int64_t block, const Tile& tile, int64_t from, int64_t to, const UpdateInputs& inputs,
             StreamView stream) const;
  // Updates a range of them, with quantized state or not; then a part of it in one parameter group.
  void apply_one(int64_t block, const Tile& tile, const RuleRange& range, bool coded,
                 const UpdateInputs& inputs, StreamView stream) const;
  void apply(int64_t block, const Tile& tile, const RuleRange& range, bool coded, const UpdateInputs& inputs,
             StreamView stream) const;
  // Updates a tensor with factored second moments.
  void apply_factored(int64_t block, const Tile& tile, const RuleRange& range, const UpdateInputs& inputs,
                      StreamView stream) const;
  // Updates a tensor of matrices by Muon (Newton–Schulz).
  void apply_muon(int64_t block, const Tile& tile, const RuleRange& range, const UpdateInputs& inputs,
                  StreamView stream) const;
  // The arguments common to all updates of the range.
  RuleUpdate arguments(int64_t block, const Tile& tile, const RuleRange& range,
                       const UpdateInputs& inputs) const;
  void fill_master(const Tile& tile, const std::byte* weights, StreamView stream) const;
  void update_tile(int64_t block, int64_t tile, const UpdateInputs& inputs, StreamView stream);
  void update_on_host(int64_t block, int64_t tile, const UpdateInputs& inputs);
  void update_in_slot(int64_t block, size_t index, Tile tile, const UpdateInputs& inputs, StreamView stream);
  // An update in a slot that verifies and stamps chunks itself; false: one was damaged.
  bool update_by_granules(int64_t block, size_t index, const Tile& tile, bool unchecked,
                          const UpdateInputs& inputs, StreamView stream);
  bool update_at_once(int64_t block, size_t index, const Tile& tile, bool unchecked,
                      const UpdateInputs& inputs, StreamView stream);

  const ModelLayout& layout_;
  OptimizerConfig config_;
  DType weight_dtype_;
  MasterForm form_;
  StateTensors state_tensors_;
  int64_t seed_;
  const Kernels& kernels_;
  StreamView stream_;
  TileLayout tiles_;
  std::vector<Memory> own_;  // per tile; empty if it is in the store
  std::unique_ptr<HostUpdate> host_;
  Memory scratch_, host_scratch_;  // for updates on this device, and on the host
  StreamView host_stream_;
  int64_t t_ = 0;
};

}  // namespace lm
