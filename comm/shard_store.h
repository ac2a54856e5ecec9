// Arrays of which every rank keeps a shard: a store whose off-device tiers are the other ranks. Fetching an
// array of weights gathers it from all of them, in its slot; what is written back is this rank's shard alone,
// and an update may change that in place.
// Gradients are the other way round: each rank has made an array in its slot, their reduce_scatter
// (Gradients) leaves the sum of this rank's shard there, and nothing but that is ever fetched again.
//
// This rank's shards lie in memory of the device, or as arrays of another store, which has them on a farther
// tier. The schedule then brings a shard into a slot of that store before this one needs it (Pool::
// kWeightShards, kGradientShards), and writes it back from there; outside of a step this store does both.
//
// Every rank makes the same calls in the same order, as the schedule does. The compute thread calls. On a GPU
// whole arrays move in the group's stream: what uses a slot waits for what was last moved there, and for
// nothing later.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/cuda.h"
#include "comm/collective_names.h"
#include "comm/group.h"
#include "offload/store.h"

namespace lm {

struct ShardStoreSetup {
  Group& group;                     // borrowed
  std::vector<int64_t> bytes = {};  // of each whole array; 0: not in here
  // Of an array, every rank's, or those of each group of so many neighbouring ranks; together the whole.
  std::function<std::vector<ByteRange>(int64_t)> shards;
  std::function<std::string(int64_t)> name;  // of an array, for messages
  int64_t slots = 0;
  bool gathers = true;     // a fetch brings the whole array; else this rank's shard
  StreamView stream = {};  // compute's: arrays lie on its device
  // Borrowed; has this rank's shards of the arrays that it holds, by their numbers, and uses its slots in
  // `stream`, or (of arrays that are not gathered) in the group's. Null: all shards are on the device.
  Store* tier = nullptr;
};

class ShardStore final : public Store {
 public:
  explicit ShardStore(ShardStoreSetup setup);

  void fetch(int64_t array, int64_t slot) override;
  void allocate_slot(int64_t array, int64_t slot) override;
  void write_back(int64_t array) override;
  void forget(int64_t array) override;
  void flush() override {}
  std::byte* use(int64_t array) override;
  std::byte* use_unchecked(int64_t array, Arrival* arrival) override;
  // What another rank has, and no slot here, reads as zeros.
  void read(int64_t array, int64_t begin, std::span<std::byte> out) override;
  void reset() override;
  void resize(int64_t array, int64_t bytes) override;
  bool holds(int64_t array) const override;
  bool in_slot(int64_t array) const override { return at(array).slot >= 0; }
  bool fresh(int64_t array) const override { return at(array).fresh; }
  std::byte* use_in_place(int64_t array) override;
  std::byte* use_in_group(int64_t array) override;
  bool used_in_group(int64_t array) override;

 private:
  struct Array {
    explicit Array(DeviceType device) : moved(device) {}
    std::vector<ByteRange> shards;
    Memory own_shard;  // of this rank's shard; empty if that is on another tier
    Moved moved;       // the last that was, out of it or into it
    int64_t bytes = 0;
    int64_t slot = -1;
    bool fresh = true;
    bool on_tier = false;  // this rank's shard is an array of `tier`
  };
  struct Slot {
    Slot(DeviceType device, int64_t bytes) : memory(device, bytes), moved(device) {}
    Memory memory;
    Moved moved;  // the last that was, into it or out of it
  };
  Array& at(int64_t array) { return arrays_[static_cast<size_t>(array)]; }
  const Array& at(int64_t array) const { return arrays_[static_cast<size_t>(array)]; }
  ByteRange own(const Array& array) const {
    return array.shards[static_cast<size_t>(setup_.group.rank()) % array.shards.size()];
  }
  Slot& slot_of(const Array& array) { return slots_[static_cast<size_t>(array.slot)]; }
  StreamView way() const { return setup_.group.stream(setup_.stream); }
  void enter(int64_t array, int64_t slot);
  // This rank's shard is copied between its slot and its tier in the stream that uses the tier: an update
  // changes weights in compute's.
  bool copies_in_compute(const Array& array) const { return array.on_tier && setup_.gathers; }
  StreamView copies(const Array& array) const { return copies_in_compute(array) ? setup_.stream : way(); }
  void begin_copies(const Array& array, Slot& slot);
  void end_copies(Array& array);
  void copy_from_shard(int64_t array, std::byte* to);
  void copy_to_shard(int64_t array, const std::byte* from);

  ShardStoreSetup setup_;
  CollectiveNames gathers_;
  std::vector<Array> arrays_;
  std::vector<Slot> slots_;
};

}  // namespace lm
