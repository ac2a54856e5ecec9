// Gradients of one optimizer step: a flat array per block, laid out as its weights, added up by the backward
// pass on the compute device; then the norm over all of them and what clipping makes of it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/arena.h"
#include "config/config.h"
#include "kernels/kernels.h"
#include "spec/block_layout.h"

namespace lm {

class Gradients {
 public:
  Gradients(const ModelLayout& layout, DType dtype, const Kernels& kernels, StreamView stream);

  std::byte* block(int64_t b) const { return blocks_[static_cast<size_t>(b)].data(); }
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
  std::vector<Memory> blocks_;
  Memory sums_;                         // fp64 [granules of all blocks]
  std::vector<int64_t> first_granule_;  // of each block
};

// The factor that clipping gives a gradient of this norm: min(1, limit / (norm + 1e-6)), in fp32.
float clip_factor(double norm, double limit);

}  // namespace lm
