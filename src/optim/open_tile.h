// A tile of optimizer state outside of a step (saving, export), on any tier: device memory, host memory, or a
// slot of its store. It is only read; a store's slot is freed at the end of this object, so only one at a
// time, and none while a schedule has slots filled (TrainStep::flush empties them). Used by the compute
// thread.
#pragma once

#include <cstdint>
#include <span>

#include "base/staging.h"
#include "offload/store.h"
#include "optim/rules/rules.h"
#include "spec/block_layout.h"

namespace lm {

// A tile's elements of a block's flat array.
struct TileRange {
  int64_t first = 0, elements = 0;
  int64_t end() const { return first + elements; }
};

// Split masters: joins bf16 weights and their low halves to fp32 values.
void join_masters(std::span<const uint16_t> weights, std::span<const uint16_t> low, float* out);

struct TileSource {
  const StateTensors& streams;
  MasterForm form;
  const BlockLayout& block;
  TileRange range;
  const std::byte* data;  // its memory, or null: `array` of the store
  bool host;              // `data` is host memory, else the stream's device's
  Store* store;           // null with `data`
  int64_t array;
};

class OpenTile {
 public:
  explicit OpenTile(const TileSource& source);
  ~OpenTile();
  OpenTile(const OpenTile&) = delete;
  OpenTile& operator=(const OpenTile&) = delete;

  // No update has touched it yet: zeros, except an fp32 master, which equals the working weights.
  bool fresh() const { return at_.data == nullptr; }
  // Size of a state tensor for the block's elements [from, to).
  int64_t bytes(size_t stream, int64_t from, int64_t to) const {
    return at_.streams[stream].bytes(at_.block.count(from, to));
  }
  // Reads a state tensor for the block's elements [from, to), which are in the tile: calls take(offset, bytes
  // of host memory) until all are passed. `weights`: the working weights of these elements; only used by a
  // fresh one.
  void read(size_t stream, int64_t from, int64_t to, const std::byte* weights, Staging& staging,
            const Staging::Take& take) const;
  // Reads the fp32 masters of the same elements, in any form, into `out` (host memory); complete on return.
  void read_master(int64_t from, int64_t to, const std::byte* weights, float* out, Staging& staging) const;

 private:
  bool master(size_t stream) const { return has_master(at_.form) && stream + 1 == at_.streams.size(); }
  TileSource at_;  // its store is null if nothing was ever written, too
};

}  // namespace lm
