// The counts of a range of a unit's flat array on which the size of optimizer state depends: all elements;
// those of small tensors, whose state stays in fp32 even if other state is quantized; those of vectors; and
// the rows and columns of matrices. Outside are elements of tensors other than a transformer block's
// matrices: vectors, the embedding, the head, virtual tokens.
#pragma once

#include <cstdint>

namespace lm {

struct Elements {
  int64_t all = 0;
  int64_t small = 0;
  int64_t vectors = 0;
  int64_t outside = 0;
  int64_t rows = 0, columns = 0;  // of the matrices that begin in it
  constexpr int64_t large() const { return all - small; }
};

}  // namespace lm
