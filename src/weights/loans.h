// Loans of weights. Compute borrows a unit (a block, or a segment of a vocabulary-chunked head): `acquire`
// (the schedule has started its fetch, if any), `use` (waits only for a fetch), and the loan's end returns
// the slot. Units on the device are always available, and a loan of them costs nothing. One thread, the
// rank's compute thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/arena.h"
#include "offload/store.h"
#include "spec/block_layout.h"

namespace lm {

class WeightStore;

// A borrowed unit: move-only; using it after an update of its weights throws (the version has changed).
class Loan {
 public:
  Loan(Loan&& other) noexcept;
  Loan& operator=(Loan&&) = delete;
  ~Loan();
  // The unit's trainable and frozen memory, and that of its own_bytes where these do not lie behind the
  // others; else null. Valid until the loan ends.
  std::byte* trainable() const;
  std::byte* frozen() const;
  std::byte* own() const;

 private:
  friend class WeightStore;
  Loan(WeightStore& store, int64_t unit);
  WeightStore* store_;
  int64_t unit_;
  int64_t version_;
};

// A unit's weights outside of a step (loading, export): fetched from their tier at first use; a caller that
// changes them writes them back with close(). Only one at a time for offloaded weights, and none while a
// schedule has slots filled (TrainStep::flush empties them).
class OpenUnit {
 public:
  OpenUnit(WeightStore& store, int64_t unit, bool changes);
  OpenUnit(OpenUnit&& other) noexcept;
  OpenUnit& operator=(OpenUnit&&) = delete;
  ~OpenUnit();  // without close() changes are dropped: a write may fail, and a destructor cannot report it
  // Starts the write-back of changes. Throws Error(20, 21).
  void close();
  std::byte* trainable() const;
  std::byte* frozen() const;  // in shards, of common_bytes
  // A tensor of the unit; for the head's matrix, a segment's first row.
  std::byte* tensor(const TensorPlace& place) const;
  int64_t unit() const { return unit_; }

 private:
  void bring() const;
  WeightStore* store_;
  int64_t unit_;
  bool changes_;
  mutable bool brought_ = false;
};

// The placement of weights without their own memory; all is borrowed.
struct WeightPlaces {
  // Holds the offloaded units, of each the part that moves (moves_frozen); the rest of a unit is on the
  // device.
  Store* store = nullptr;
  bool chunked_head = false;  // the head's units are segments of its vocabulary
  // The embedding's weights (if some of them are frozen, these), in memory that the device can use in place.
  std::byte* embedding = nullptr;
  bool shards = false;          // `store` has a shard of each of its arrays
  bool loads_embedding = true;  // false: another rank fills `embedding`
  // Memory that ranks have in common for the frozen weights that stay on the device, frozen_in_memory()
  // bytes; empty: each rank has its own.
  std::span<std::byte> frozen = {};
  bool loads_frozen = true;  // false: another rank fills `frozen`
};

class WeightStore {
 public:
  // `dtype`: of the trainable weights.
  WeightStore(const ModelLayout& layout, DType dtype, DeviceType device, const WeightPlaces& places = {});

  // Bytes of the frozen weights that stay on the device.
  static int64_t frozen_in_memory(const ModelLayout& layout, DType dtype, const WeightPlaces& places);

  Loan acquire(int64_t unit) { return Loan(*this, unit); }
  OpenUnit open(int64_t unit, bool changes) { return OpenUnit(*this, unit, changes); }
  const std::vector<Unit>& units() const { return units_; }
  DType dtype() const { return dtype_; }
  // The units of a block's tensor: one, or the segments of a vocabulary-chunked head.
  std::vector<int64_t> units_of(int64_t block, const TensorPlace& place) const;

  // For the update: the unit's trainable weights, on the device or in their slot; for sharded weights this
  // rank's shard on its tier (Store::use_in_place). Refused while the unit is on loan.
  std::byte* trainable_in_place(int64_t unit);
  // Marks the update of a unit as complete: earlier loans of it become invalid.
  void advance(int64_t unit) { ++places_[static_cast<size_t>(unit)].version; }
  // Whether each rank has a shard of the unit's trainable weights; `read` copies bytes of this rank's.
  bool in_shards(int64_t unit) const { return shards_ && trainable_off_device(unit); }
  void read(int64_t unit, int64_t begin, std::span<std::byte> out) const {
    off_device_->read(unit, begin, out);
  }
  bool through_slots(int64_t unit) const { return off_device_ != nullptr && off_device_->holds(unit); }
  // False where the frozen weights are fetched instead.
  bool trained_through_slots(int64_t unit) const { return trainable_off_device(unit); }
  // Whether this rank loads the unit's frozen weights; false: another rank does.
  bool loads_frozen(int64_t unit) const;
  // The unit's trainable weights are the embedding's, in host memory that a GPU uses in place.
  bool in_host_memory(int64_t unit) const {
    return unit == 0 && embedding_ != nullptr && units_[0].frozen_bytes == 0;
  }

 private:
  friend class Loan;
  friend class OpenUnit;
  struct UnitPlace {
    Memory trainable;                       // elements of `dtype`
    Memory frozen;                          // where the others are in shards, own_bytes
    std::byte* frozen_elsewhere = nullptr;  // in memory of several ranks
    bool moves_frozen = false;              // where it is offloaded
    int64_t version = 0;                    // counts updates
    int64_t loans = 0;                      // open now
  };
  // Whether that part of the unit is offloaded.
  bool trainable_off_device(int64_t unit) const;
  bool frozen_off_device(int64_t unit) const;
  std::byte* trainable(int64_t unit) const;
  std::byte* frozen(int64_t unit) const;
  // Of own_bytes where the others are in shards; else null.
  std::byte* own(int64_t unit) const;

  const ModelLayout& layout_;
  DType dtype_;
  Store* off_device_;
  std::byte* embedding_;
  bool shards_;  // `store` has a shard of each of its arrays
  bool loads_embedding_, loads_frozen_;
  std::vector<Unit> units_;
  std::vector<UnitPlace> places_;  // of each unit
};

}  // namespace lm
