// Updates of factored second moments (optim/rules/factored.h), shared by both launchers. The order of every
// sum is fixed by the matrix's shape alone:
//
//   a row of squares      fp32; element j to lane j mod 64, then lanes (l, l + 32), (l, l + 16), ... (0, 1)
//   a column of squares   fp32; factored_part(rows) rows in order, then these sums in order
//   numbers of rows       fp64; as the squares of a granule (norms_formula.h)
#pragma once

#include "base/host_device.h"
#include "kernels/kernels.h"

namespace lm {

inline constexpr int kRowLanes = 64;

// The parts of a scratch.
struct FactoredScratch {
  float* step = nullptr;           // factor, decay, mean of the rows
  float* row_sum = nullptr;        // [rows], of squares, then of squared directions
  float* row_factor = nullptr;     // [rows]
  float* row_weights = nullptr;    // [rows], of squared weights
  float* column_factor = nullptr;  // [columns]
  float* partial = nullptr;        // [parts, columns], of squares
};
LM_HOST_DEVICE FactoredScratch divide_scratch(const FactoredState& a) {
  float* const rows = a.scratch + 4;
  float* const columns = rows + 3 * a.rows;
  return {a.scratch, rows, rows + a.rows, rows + 2 * a.rows, columns, columns + a.columns};
}

template <class F>
LM_HOST_DEVICE F squared(F gradient, F eps) {
  return gradient * gradient + eps;
}
// The next value of a row's or column's moment.
template <class R, class F>
LM_HOST_DEVICE F averaged(const R& rule, F mean, F state) {
  return fused(F(rule.one_minus_beta2), mean, F(rule.beta2) * state);
}
template <class R, class F>
LM_HOST_DEVICE F factor_of(const R& rule, F statistic) {
  return F(1.f) / (root(statistic) + F(rule.root_eps));
}
// With all gradients zero the mean of the rows is 0, and any nonzero number works.
LM_HOST_DEVICE float mean_of_rows(double sum, int64_t rows) {
  const float mean = static_cast<float>(sum / static_cast<double>(rows));
  return mean == 0.f ? 1.f : mean;
}
template <class F>
LM_HOST_DEVICE F direction_of(F gradient, F row_factor, F column_factor) {
  return gradient * row_factor * column_factor;
}
template <class F>
LM_HOST_DEVICE F stepped(F weight, F direction, F factor, F decay) {
  return one_nan(weight * decay - factor * direction);
}

}  // namespace lm
