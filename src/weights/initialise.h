// Fresh weights, a pure function of (seed, tensor, index): for `model.init = "random"` and for new adapters.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "spec/block_layout.h"

namespace lm {

struct FreshTensor {
  const Parameter& parameter;
  uint64_t seed;
  uint32_t number;  // of the tensor in the model
  DType dtype;      // of its elements in memory
};

// Fills `memory` (host) for rows [first_row, first_row + rows) of a tensor: matrices and embeddings N(0,
// 0.02), norms and buffers Parameter::neutral, biases 0, LoRA A uniform in ±1/sqrt(in) (Kaiming with a =
// sqrt(5)), LoRA B 0, prefixes and prompts N(0, 1), an encoder's weights and biases uniform in ±1/sqrt(in).
// The result does not depend on the number of threads.
void initialise(const FreshTensor& tensor, std::byte* memory, int64_t first_row, int64_t rows,
                int threads = 1);

// The same for a range of its elements, the first one at `memory`; one thread.
void initialise_elements(const FreshTensor& tensor, std::byte* memory, int64_t first, int64_t elements);

}  // namespace lm
