// The approximately nearest orthogonal matrix, by the Newton–Schulz iteration of Muon (optim/rules/muon.h),
// in bf16, with torch.optim.Muon's coefficients and rounding. A matrix with more rows than columns is
// transposed first. Calls a table's kernels, so that a plan can count its cost.
//
//   x = x / max(|x|, 1e-7);  five times: g = x xT, x = 3.4445 x + (-4.7750 g + 2.0315 g g) x
//
// which moves singular values close to 1, except those that are tiny relative to the largest.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace lm {

// Bytes of the call's scratch memory on the device: x is at its beginning, padded with zeros to a whole
// granule by the update's first call.
int64_t newton_schulz_scratch_bytes(int64_t rows, int64_t columns);
// Returns the result in `scratch`, [rows, columns] in bf16. The kernels must be a library table's
// (library.h).
std::byte* newton_schulz(const Kernels& kernels, int64_t rows, int64_t columns, std::byte* scratch,
                         StreamView stream);

}  // namespace lm
