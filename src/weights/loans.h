// Weights on loan. Compute borrows a block: `acquire` (what has to be fetched is on its way, as the schedule
// says), `use` (waits only if something was fetched), and the loan's end returns the slot. Blocks that live
// near are always at hand, and a loan of them costs nothing. One thread, the rank's compute thread.
#pragma once

#include <cstdint>
#include <vector>

#include "base/arena.h"
#include "base/state.h"
#include "offload/store.h"
#include "spec/block_layout.h"

namespace lm {

class WeightStore;

// A borrowed block: move-only; using it after its weights were updated throws (the version has moved on).
class Loan {
 public:
  Loan(Loan&& other) noexcept;
  Loan& operator=(Loan&&) = delete;
  ~Loan();
  // Valid until the loan ends.
  std::byte* trainable() const;
  std::byte* frozen() const;

 private:
  friend class WeightStore;
  Loan(WeightStore& store, int64_t block);
  WeightStore* store_;
  int64_t block_;
  int64_t version_;
};

// A block's weights outside of a step (loading, export): brought from their home when first asked for, and
// taken back if they were to be changed. One at a time where weights are streamed, and none while a schedule
// has slots filled (TrainStep::flush empties them).
class OpenBlock {
 public:
  OpenBlock(WeightStore& store, int64_t block, bool changes);
  OpenBlock(OpenBlock&& other) noexcept;
  OpenBlock& operator=(OpenBlock&&) = delete;
  ~OpenBlock() noexcept(false);
  std::byte* trainable() const;
  std::byte* frozen() const;
  int64_t block() const { return block_; }

 private:
  void bring() const;
  WeightStore* store_;
  int64_t block_;
  bool changes_;
  mutable bool brought_ = false;
};

class WeightStore {
 public:
  // Blocks that `far` (may be null) holds live there: their trainable part, or, where the base is frozen, the
  // frozen one; what else a block has is near.
  WeightStore(const ModelLayout& layout, DType dtype, DeviceType device, Store* far = nullptr);

  Loan acquire(int64_t block) { return Loan(*this, block); }
  OpenBlock open(int64_t block, bool changes) { return OpenBlock(*this, block, changes); }

  // For the update: the block's trainable weights, near or in their slot. Refused while the block is on loan.
  std::byte* trainable_home(int64_t block);
  // The update of a block is complete: earlier loans of it are void.
  void advance(int64_t block) { ++blocks_[static_cast<size_t>(block)].version; }
  bool streamed(int64_t block) const { return far_ != nullptr && far_->holds(block); }

  // The working weights of every trainable tensor, in block order.
  void visit_state(StateVisitor& visitor);

 private:
  friend class Loan;
  friend class OpenBlock;
  struct Block {
    Memory trainable;  // flat_elements of the model's type
    Memory frozen;
    int64_t version = 0;  // counts updates
    int64_t loans = 0;    // open now
  };
  // Whether that part of the block lives in the store.
  bool trainable_away(int64_t block) const;
  bool frozen_away(int64_t block) const;
  std::byte* trainable(int64_t block) const;
  std::byte* frozen(int64_t block) const;

  const ModelLayout& layout_;
  DType dtype_;
  Store* far_;
  std::vector<Block> blocks_;
};

}  // namespace lm
