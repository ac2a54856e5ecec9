// An adapter added into its base weights: W + s B A, with DoRA each row then scaled to its trained length;
// all of it in fp32.
#pragma once

#include "kernels/kernels.h"
#include "spec/block_layout.h"

namespace lm {

struct MergeTarget {
  const std::byte* trainable;  // the block's flat array, in host memory
  std::byte* weight;           // of the frozen tensor, changed in place
  int threads;
  const Kernels& kernels;  // the CPU's
};

// Adds every adapter of `layout` that belongs to its frozen tensor `place`; others are left alone.
void merge_adapters(const BlockLayout& layout, const TensorPlace& place, const AdapterSpec& adapter,
                    const MergeTarget& target);

}  // namespace lm
