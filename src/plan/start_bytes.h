// Host memory of what adapters begin with, while it is computed. Pure.
#pragma once

#include <cstdint>

#include "spec/block_layout.h"

namespace lm {

// Memory to initialise adapters that begin with what quantizing lost, or with the lengths of quantized rows
// (weights/loftq.h, row_lengths.h): the largest matrix of the files in fp32, and its codes.
int64_t loftq_bytes(const ModelLayout& layout);
// The same of PiSSA (weights/principal_pairs.h), which needs any matrix whole, and a quantized one twice. 0
// without it.
int64_t principal_pair_bytes(const ModelLayout& layout);

}  // namespace lm
