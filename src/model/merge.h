// An adapter added into its base weights: W' = round(W + s B A), the product and the sum in fp32.
#pragma once

#include "model/bind.h"

namespace lm {

struct MergeTarget {
  const std::byte* trainable;  // the block's adapter tensors, where the compute device has them
  std::byte* weight;           // the frozen tensor's host copy, changed in place
  DType dtype;
  StreamView stream;       // of the compute device
  const Kernels& kernels;  // the CPU's
};

// Adds every adapter of `layout` that belongs to the frozen tensor `place`; others are left alone.
void merge_adapters(const BlockLayout& layout, const TensorPlace& place, const AdapterSpec& adapter,
                    const MergeTarget& target);

}  // namespace lm
