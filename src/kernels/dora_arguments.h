// The arguments of the kernels of DoRA and IA3 (kernels.h has those of the others, and the rules for all of
// them). IA3 multiplies what a linear layer reads or computes by trained factors, column by column. DoRA
// scales each row of an adapted matrix to a trained length: W' = m (W + s B A) / |W + s B A|, by rows.
#pragma once

#include <cstdint>

#include "base/view.h"

namespace lm {

// The lengths of the rows of W + s B A, which is never made: norms[i] = sqrt(sum of W[i]² + s B[i]·H[i]) for
// H = 2 W Aᵀ + s B (A Aᵀ), and factors[i] = magnitude[i] / norms[i] in fp32. Sums are in fp64: squares of
// element j in lane j mod 64 in order, then the tree of granule_norms; B[i]·H[i] in order. A sum below 0,
// which only rounding makes, counts as 0.
struct AdaptedNorms {
  View weight;                      // [rows, in]
  View b, h;                        // [rows, r], of one type
  const void* magnitude = nullptr;  // [rows], of that type
  float scale = 1;                  // s
  float* norms = nullptr;           // [rows]
  float* factors = nullptr;         // [rows]
};

// out[t, j] = factors[j] * x[t, j] (+ bias[j]) (+ addend[t, j]) (- subtrahend[t, j]), in fp32 in this order
// and rounded once. All of one type.
struct ScaleColumns {
  View x, out;
  const float* factors = nullptr;  // null: 1
  const void* bias = nullptr;      // null: none
  View addend = {};                // may be out
  View subtrahend = {};
};

// The gradient of factors * x with factors = magnitude / norms, where norms count as constants: out =
// factors * dy, rest = (factors - 1) * dy, both rounded once; sums[j] = (sum over rows of dy * x) / norms[j],
// added in fp32 by kRowBlock rows.
struct ScaleColumnsBackward {
  View dy, x;  // [rows, columns]
  View out;
  View rest = {};  // undefined: not wanted
  const float* factors = nullptr;
  const float* norms = nullptr;  // null: 1
  float* sums = nullptr;         // [columns], overwritten
  float* partial = nullptr;      // scratch [ceil(rows / kRowBlock), columns]
};

}  // namespace lm
