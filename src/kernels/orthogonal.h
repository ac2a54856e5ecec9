// A matrix's nearest orthogonal one, roughly: the Newton-Schulz iteration of Muon (optim/rules/muon.h), in
// bf16, with torch.optim.Muon's coefficients and rounding. Of a matrix with more rows than columns it is that
// of its transpose. Calls a table's kernels, so that a plan can count what it costs.
//
//   x = x / max(|x|, 1e-7);  five times: g = x xT, x = 3.4445 x + (-4.7750 g + 2.0315 g g) x
//
// which brings singular values near 1 but for those that are next to nothing beside the largest.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"

namespace lm {

// Bytes of the device's memory that the call works in: x lies at its beginning, filled up with zeros to a
// whole granule as the update's first call leaves it.
int64_t orthogonal_scratch_bytes(int64_t rows, int64_t columns);
// Where in `scratch` the result is, [rows, columns] in bf16. The kernels are a library table's (library.h).
std::byte* orthogonalise(const Kernels& kernels, int64_t rows, int64_t columns, std::byte* scratch,
                         StreamView stream);

}  // namespace lm
