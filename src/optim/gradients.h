// Gradients of one optimizer step: a flat array per block, laid out as its weights, added up by the backward
// pass on the compute device; then the norm over all of them and what clipping makes of it. Arrays that live
// in a store are lent back for every addition, so that the sums are the same wherever they live.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/arena.h"
#include "config/config.h"
#include "kernels/kernels.h"
#include "offload/store.h"
#include "spec/block_layout.h"

namespace lm {

class Gradients {
 public:
  // Blocks that `store` (may be null) holds live there.
  Gradients(const ModelLayout& layout, DType dtype, const Kernels& kernels, StreamView stream,
            Store* store = nullptr);

  bool streamed(int64_t b) const { return store_ != nullptr && store_->holds(b); }
  // Of a block in the store: where it lies in its slot.
  std::byte* block(int64_t b) const;
  // The step's first addition to the block comes next and overwrites it. What lies between tensors must be
  // zero, and in a slot it is whatever was there before.
  void begin(int64_t b);
  DType dtype() const { return dtype_; }
  void zero(int64_t b);

  // The block's gradient is final: its granule norms are enqueued.
  void reduce(int64_t b);
  // Squared norm of block b, or of all blocks: granules in index order, in fp64. Waits for what was enqueued.
  double block_square(int64_t b) const;
  double total_square() const;

 private:
  const ModelLayout& layout_;
  DType dtype_;
  const Kernels& kernels_;
  StreamView stream_;
  Store* store_;
  std::vector<Memory> blocks_;          // empty where the store has it
  Memory sums_;                         // fp64 [granules of all blocks]
  std::vector<int64_t> first_granule_;  // of each block
};

// The factor that clipping gives a gradient of this norm: min(1, limit / (norm + 1e-6)), in fp32.
float clip_factor(double norm, double limit);

}  // namespace lm
