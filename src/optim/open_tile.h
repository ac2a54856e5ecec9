// A tile of optimizer state outside of a step (saving, export), wherever it lives: of the device, of host
// memory or through a slot of its store. It is read there and stays as it is; a store's is dropped when this
// ends, so one at a time, and none while a schedule has slots filled (TrainStep::flush empties them). The
// compute thread.
#pragma once

#include <cstdint>
#include <span>

#include "base/staging.h"
#include "offload/store.h"
#include "optim/rules/rules.h"
#include "spec/block_layout.h"

namespace lm {

// Elements of a block's flat array that a tile has.
struct TileRange {
  int64_t first = 0, elements = 0;
  int64_t end() const { return first + elements; }
};

// Split masters: what bf16 weights, and the low halves beside them, are in fp32.
void join_masters(std::span<const uint16_t> weights, std::span<const uint16_t> low, float* out);

class OpenTile {
 public:
  // `data`: its memory (`host`: the host's, else the stream's device's), or null: `array` of the store.
  OpenTile(const StateStreams& streams, MasterForm form, const BlockLayout& block, TileRange range,
           const std::byte* data, bool host, Store* store, int64_t array);
  ~OpenTile();
  OpenTile(const OpenTile&) = delete;
  OpenTile& operator=(const OpenTile&) = delete;

  // No update has touched it yet: zeros, but an fp32 master is what the working weights say.
  bool fresh() const { return data_ == nullptr; }
  // Of a stream for the block's elements [from, to).
  int64_t bytes(size_t stream, int64_t from, int64_t to) const {
    return streams_[stream].bytes(block_.count(from, to));
  }
  // A stream's values of the block's elements [from, to), which lie in the tile: take(offset, bytes of host
  // memory) until all have been given. `weights`: the working weights of these elements; only of a fresh one.
  void read(size_t stream, int64_t from, int64_t to, const std::byte* weights, Staging& staging,
            const Staging::Take& take) const;
  // The fp32 value of the same elements, whatever its form, into `out` (host memory); complete on return.
  void read_master(int64_t from, int64_t to, const std::byte* weights, float* out, Staging& staging) const;

 private:
  bool master(size_t stream) const { return has_master(form_) && stream + 1 == streams_.size(); }
  const StateStreams& streams_;
  MasterForm form_;
  const BlockLayout& block_;
  TileRange range_;
  const std::byte* data_;
  bool host_;
  Store* store_;  // null where `data` was given, or nothing was ever written
  int64_t array_;
};

}  // namespace lm
