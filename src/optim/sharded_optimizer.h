// The optimizer's state of a rank and the update of a block. A tile is a run of granules of a block with its
// streams side by side: those of the rule, then the master (or its low half). Tiles on the device lie in
// memory of this object, the others in a store, whose slots they pass through; with a GPU, what is off it may
// instead be updated by the CPU (host_update.h), in host memory of this object or in a store of host memory.
// Where a tile lies, who updates it and how long it is never changes a bit. (Of a rule with products a GPU's
// rank updates all itself.) The compute thread calls; on a
// GPU the update is enqueued.
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

// How blocks are cut into tiles and which of them are in `store`; the default: each block is one tile on the
// device.
struct TileLayout {
  std::vector<int64_t> first_tile;     // of each block, and behind the last; empty: one tile per block
  std::vector<int64_t> first_granule;  // of each tile, in its block
  std::vector<int64_t> granules;       // of each tile, 0 of one that other ranks alone have
  std::vector<char> off_device;        // per tile; empty: none
  std::vector<char> through_slots;     // per tile, of those: in `store`; the others in host memory of ours
  Store* store = nullptr;              // borrowed; may be null
};

// Who updates tiles that are off the device.
struct UpdateSite {
  bool host = false;  // the CPU, beside a GPU; the rest counts only then
  int threads = 1;
  std::span<std::byte> staging = {};  // pinned, as HostUpdate wants it
};

struct OptimizerSetup {
  const ModelLayout& layout;
  const OptimizerConfig& config;
  DType weight_dtype = DType::kBF16;  // bf16 takes config.master; fp32 weights are their own master
  int64_t seed = 0;
  const Kernels& kernels;
  TileLayout tiles = {};
  DType gradient_dtype = DType::kF32;  // with a site on the host
  UpdateSite site = {};
  DeviceClock* clock = nullptr;  // borrowed; of copies that the site needs
};

struct UpdateInputs {
  std::byte* weights = nullptr;          // working weights of the block, or of the unit that the tile lies in
  const std::byte* gradients = nullptr;  // likewise
  DType gradient_dtype = DType::kF32;
  float gradient_scale = 1;  // clipping
  double lr = 0;
  int64_t step = 0;      // optimizer step, keys stochastic rounding
  bool ready = false;    // weights and gradients are complete: no work of the compute stream makes them
  int64_t first = 0;     // element of the block that `weights` and `gradients` begin with
  int64_t elements = 0;  // that they have
};

class ShardedOptimizer {
 public:
  ShardedOptimizer(const OptimizerSetup& setup, StreamView stream);

  // The masters take the loaded weights' values (a split master's low halves start at zero). With fp32
  // masters `weights` must already be there. Tiles in the store do so at their first update.
  // Tiles lie in one unit each. What the host updates passes through `staging`.
  void start(const Unit& unit, const std::byte* weights, Staging& staging);
  // One more update begins: t counts it (a skipped step does not).
  void begin_update() { ++t_; }
  // All of the block, or one of its tiles.
  void update(int64_t block, const UpdateInputs& inputs);
  void update_tile(int64_t block, int64_t tile, const UpdateInputs& inputs);
  int64_t tiles(int64_t block) const;
  int64_t t() const { return t_; }
  // An update that an error ended will not go on.
  void abandon() {
    if (host_ != nullptr) host_->abandon();
  }

  // fp32 value of a trainable tensor's master into `out` (host memory, its elements), for LoRA's export;
  // complete on return. Tiles in the store must be at home (between steps, after a flush).
  void read_master(int64_t block, const TensorPlace& place, const std::byte* weights, float* out,
                   Staging& staging) const;

  // Elements of the block's flat array that a tile has, and its state outside of a step.
  TileRange range(int64_t block, int64_t tile) const;
  OpenTile open(int64_t block, int64_t tile) const;
  // Right after the tile's update, or of one in memory of ours at any time: take(stream, offset, its bytes),
  // where they lie then, from byte `offset` of its block's on. That is host memory with all that updates have
  // made, or memory of the device, in which the compute stream makes it.
  bool shows_host_memory(int64_t block, int64_t tile) const {
    return stream_.device == DeviceType::kCpu || on_host(index(block, tile));
  }
  using TakeStream = std::function<void(size_t stream, int64_t offset, std::span<const std::byte> bytes)>;
  void show(int64_t block, int64_t tile, const TakeStream& take) const;
  // The other way: all of a tile's state from a checkpoint. fill(stream, offset, host memory) makes a
  // stream's bytes from byte `offset` of its block's on. None while a schedule has slots filled; complete
  // after staging.finish().
  using FillStream = std::function<void(size_t stream, int64_t offset, std::span<std::byte> bytes)>;
  void restore(int64_t block, int64_t tile, Staging& staging, const FillStream& fill);
  void restore_updates(int64_t t) { t_ = t; }
  // Of the store, where the tile passes through its slots; else it is in memory of ours.
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
  bool on_host(size_t index) const { return host_ != nullptr && tiles_.off_device[index] != 0; }
  // `data` is null of a tile in the store.
  Tile place(int64_t block, int64_t tile) const;
  // Where a stream of the tile begins, or its value for element `at` of the block, and its length.
  std::byte* part(const Tile& tile, size_t stream) const { return part(tile, stream, tile.first); }
  std::byte* part(const Tile& tile, size_t stream, int64_t at) const;
  int64_t part_bytes(const Tile& tile, size_t stream) const;
  // Elements [from, to) of the block, which lie in the tile.
  void apply(int64_t block, const Tile& tile, int64_t from, int64_t to, const UpdateInputs& inputs,
             StreamView stream) const;
  // A run of them, whose state is in codes or not.
  void apply(int64_t block, const Tile& tile, const RuleRange& range, bool coded, const UpdateInputs& inputs,
             StreamView stream) const;
  // A tensor whose state is statistics of rows and columns.
  void apply_factored(int64_t block, const Tile& tile, const RuleRange& range, const UpdateInputs& inputs,
                      StreamView stream) const;
  // A tensor of matrices that step by their orthogonal momentum.
  void apply_orthogonal(int64_t block, const Tile& tile, const RuleRange& range, const UpdateInputs& inputs,
                        StreamView stream) const;
  // What all updates of elements from `first` on have in common.
  RuleUpdate arguments(int64_t block, const Tile& tile, const RuleRange& range,
                       const UpdateInputs& inputs) const;
  void fill_master(const Tile& tile, const std::byte* weights, StreamView stream) const;
  void update_tile(int64_t block, int64_t tile, const UpdateInputs& inputs, StreamView stream);
  void update_on_host(int64_t block, int64_t tile, const UpdateInputs& inputs);
  void update_in_slot(int64_t block, size_t index, Tile tile, const UpdateInputs& inputs, StreamView stream);
  // An update in a slot that compares and stamps chunks itself; false: one was damaged.
  bool update_by_granules(int64_t block, size_t index, const Tile& tile, bool unchecked,
                          const UpdateInputs& inputs, StreamView stream);
  bool update_at_once(int64_t block, size_t index, const Tile& tile, bool unchecked,
                      const UpdateInputs& inputs, StreamView stream);

  const ModelLayout& layout_;
  OptimizerConfig config_;
  DType weight_dtype_;
  MasterForm form_;
  StateStreams streams_;
  int64_t seed_;
  const Kernels& kernels_;
  StreamView stream_;
  TileLayout tiles_;
  std::vector<Memory> own_;  // per tile; empty where it is in the store
  std::unique_ptr<HostUpdate> host_;
  Memory scratch_, host_scratch_;  // of updates where this computes, and on the host
  StreamView host_stream_;
  int64_t t_ = 0;
};

}  // namespace lm
