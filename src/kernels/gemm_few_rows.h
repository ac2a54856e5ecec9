// Products with a large bf16 matrix in which few rows take part, on processors with AVX-512's instructions
// for bf16: each of a mixture's experts has some 32 rows. A GEMM library packs the large matrix for each
// product, which then costs as much as the product itself. Here it is read once, as it lies, and the few rows
// are packed. Any thread.
#pragma once

#include "kernels/kernels.h"

namespace lm {

inline constexpr int64_t kFewRows = 64;  // at most: beyond them packing pays

// Whether gemm_few_rows computes it, and faster than the library: one of a linear layer's three products on
// such a processor without AMX, whose tiles are faster still.
bool multiplies_few_rows(const Gemm& g);

// An element's terms are added in pairs, in the order of the summed index: neither threads nor the number of
// rows change a bit. Scratch memory is at most 256 bytes for each column of the larger factor; throws
// std::bad_alloc before anything is written.
void gemm_few_rows(const Gemm& g, int threads);

}  // namespace lm
