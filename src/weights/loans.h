// Weights on loan. Compute borrows a block: `acquire` (starts what has to be fetched), `use` (waits only if
// something was fetched), and the loan's end returns the slot. Here everything is at home on the compute
// device, so a fetch is a no-op; the protocol is the one that streaming keeps. One thread, the rank's compute
// thread.
#pragma once

#include <cstdint>
#include <vector>

#include "base/arena.h"
#include "base/state.h"
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

class WeightStore {
 public:
  WeightStore(const ModelLayout& layout, DType dtype, DeviceType device);

  Loan acquire(int64_t block) { return Loan(*this, block); }

  // For loading, the update and saving: the home of a block's weights. Refused while the block is on loan.
  std::byte* trainable_home(int64_t block);
  std::byte* frozen_home(int64_t block);
  // The update of a block is complete: earlier loans of it are void.
  void advance(int64_t block) { ++blocks_[static_cast<size_t>(block)].version; }

  // The working weights of every trainable tensor, in block order.
  void visit_state(StateVisitor& visitor);

 private:
  friend class Loan;
  struct Block {
    Memory trainable;  // flat_elements of the model's type
    Memory frozen;
    int64_t version = 0;  // counts updates
    int64_t loans = 0;    // open now
  };
  const ModelLayout& layout_;
  DType dtype_;
  std::vector<Block> blocks_;
};

}  // namespace lm
