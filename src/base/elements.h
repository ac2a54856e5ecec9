// What a run of a block's flat array has that optimizer state is of: elements, those of small tensors, whose
// state stays in fp32 where that of others is coded, those of vectors, and the rows and columns of matrices.
// Outside are those of no transformer block's matrix: vectors, the embedding, the head.
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
