// Quantization while loading: converts a matrix of the files to the components of a quantization format, a
// bounded number of elements at a time, so that neither the matrix nor a second copy of it is ever whole in
// memory. The caller owns the memory; complete on return.
#pragma once

#include <array>
#include <functional>
#include <vector>

#include "base/staging.h"
#include "spec/block_layout.h"

namespace lm {

// Writes elements [first, first + elements) of a matrix to `to`. Called by several threads at once.
using MatrixElements = std::function<void(int64_t first, int64_t elements, std::byte* to)>;

// A quantized matrix of the files, in host memory.
struct EncodedMatrix {
  const Encoding* encoding = nullptr;
  int64_t rows = 0, columns = 0;
  std::array<std::byte*, kMostPieces> pieces = {};
  std::array<int64_t, kMostPieces> bytes = {};  // of each component
};

// Memory of a matrix's components; matrix_in allocates it.
using PieceMemory = std::array<std::vector<std::byte>, kMostPieces>;
EncodedMatrix matrix_in(PieceMemory& memory, const Encoding& encoding, int64_t rows, int64_t columns);

// Elements are of `dtype` (fp32 or bf16): the codes represent the values that the unquantized model would
// compute with.
void encode(const EncodedMatrix& matrix, DType dtype, const MatrixElements& elements, int threads);

// Its values as fp32.
void decode(const EncodedMatrix& matrix, float* out, int threads);

// Writes part `part` of a quantized tensor whose first component is at `memory`: in place, or, if `staging`
// is not null, in temporary host memory that is copied through it. `fill` writes the components.
void write_encoded(const TensorPlace& place, size_t part, std::byte* memory, Staging* staging,
                   const std::function<void(const EncodedMatrix&)>& fill);

// body(begin, end) on ranges of [0, n) that begin at multiples of `grain`, by several threads; rethrows the
// first exception.
void for_each_range(int threads, int64_t n, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

}  // namespace lm
