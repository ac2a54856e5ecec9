// Weights on loan. Compute borrows a unit (a block, or a segment of a cut head): `acquire` (what has to be
// fetched is on its way, as the schedule says), `use` (waits only if something was fetched), and the loan's
// end returns the slot. Units on the device are always at hand, and a loan of them costs nothing. One
// thread, the rank's compute thread.
#pragma once

#include <cstdint>
#include <vector>

#include "base/arena.h"
#include "offload/store.h"
#include "spec/block_layout.h"

namespace lm {

class WeightStore;

// A borrowed unit: move-only; using it after its weights were updated throws (the version has moved on).
class Loan {
 public:
  Loan(Loan&& other) noexcept;
  Loan& operator=(Loan&&) = delete;
  ~Loan();
  // Where the unit's parts begin. Valid until the loan ends.
  std::byte* trainable() const;
  std::byte* frozen() const;

 private:
  friend class WeightStore;
  Loan(WeightStore& store, int64_t unit);
  WeightStore* store_;
  int64_t unit_;
  int64_t version_;
};

// A unit's weights outside of a step (loading, export): brought from their home when first asked for; whoever
// changes them takes them back with close(). One at a time where weights pass through slots, and none while a
// schedule has slots filled (TrainStep::flush empties them).
class OpenUnit {
 public:
  OpenUnit(WeightStore& store, int64_t unit, bool changes);
  OpenUnit(OpenUnit&& other) noexcept;
  OpenUnit& operator=(OpenUnit&&) = delete;
  ~OpenUnit();  // without close() changes are dropped: a write may fail, and a destructor cannot say so
  // What was changed is on its way home. Throws Error(20, 21).
  void close();
  std::byte* trainable() const;
  std::byte* frozen() const;
  // A tensor that the unit holds; of the head's matrix, a segment's first row.
  std::byte* tensor(const TensorPlace& place) const;
  int64_t unit() const { return unit_; }

 private:
  void bring() const;
  WeightStore* store_;
  int64_t unit_;
  bool changes_;
  mutable bool brought_ = false;
};

class WeightStore {
 public:
  // `dtype`: of what is trained. Units that `store` (may be null) holds live there: their trainable part, or,
  // where the base is frozen, the frozen one; what else a unit has is on the device. The embedding's weights
  // lie in `embedding` if not null: borrowed memory that the device can use in place.
  WeightStore(const ModelLayout& layout, DType dtype, DeviceType device, Store* store = nullptr,
              bool cut_head = false, std::byte* embedding = nullptr, bool shards = false);

  Loan acquire(int64_t unit) { return Loan(*this, unit); }
  OpenUnit open(int64_t unit, bool changes) { return OpenUnit(*this, unit, changes); }
  const std::vector<Unit>& units() const { return units_; }
  DType dtype() const { return dtype_; }
  // The units that a block's tensor lies in: one, or the segments of a cut head.
  std::vector<int64_t> units_of(int64_t block, const TensorPlace& place) const;

  // For the update: the unit's trainable weights, on the device or in their slot; of weights in shards, this
  // rank's at home (Store::use_home). Refused while the unit is on loan.
  std::byte* trainable_home(int64_t unit);
  // The update of a unit is complete: earlier loans of it are void.
  void advance(int64_t unit) { ++homes_[static_cast<size_t>(unit)].version; }
  // Each rank has a shard of the unit's trainable weights; `read` gives bytes of this one's.
  bool in_shards(int64_t unit) const { return shards_ && trainable_off_device(unit); }
  void read(int64_t unit, int64_t begin, std::span<std::byte> out) const {
    off_device_->read(unit, begin, out);
  }
  bool through_slots(int64_t unit) const { return off_device_ != nullptr && off_device_->holds(unit); }
  // Not of an adapter, whose base does.
  bool trained_through_slots(int64_t unit) const { return trainable_off_device(unit); }
  // The unit's trainable weights are the embedding's, in host memory that a GPU uses in place.
  bool in_host_memory(int64_t unit) const {
    return unit == 0 && embedding_ != nullptr && units_[0].frozen_bytes == 0;
  }

 private:
  friend class Loan;
  friend class OpenUnit;
  struct UnitHome {
    Memory trainable;  // elements of `dtype`
    Memory frozen;
    int64_t version = 0;  // counts updates
    int64_t loans = 0;    // open now
  };
  // Whether that part of the unit lives in the store.
  bool trainable_off_device(int64_t unit) const;
  bool frozen_off_device(int64_t unit) const;
  std::byte* trainable(int64_t unit) const;
  std::byte* frozen(int64_t unit) const;

  const ModelLayout& layout_;
  DType dtype_;
  Store* off_device_;
  std::byte* embedding_;
  bool shards_;  // `store` has a shard of each of its arrays
  std::vector<Unit> units_;
  std::vector<UnitHome> homes_;  // of each unit
};

}  // namespace lm
