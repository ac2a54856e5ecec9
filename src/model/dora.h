// DoRA: the rows of an adapted projection have trained lengths. W' = m (W + s B A) / n by rows, n the lengths
// of the rows of W + s B A, which count as constants in the backward pass. So y = (m / n) z (+ bias) for
// z = W x + s B (A x), and with dropout y = W x (+ bias) + (m / n) z - W drop(x), z of drop(x). Neither the
// product B A nor W' is ever made. model/linear.cpp calls these halves; memory is the caller's and the
// arena's.
#pragma once

#include "model/linear.h"

namespace lm {

// Whether the projection's adapters have magnitudes: all or none. Rows without an adapter have m / n = 1.
bool scales_rows(const Linear& linear);

// A Aᵀ [r, r] of each adapter, in the arena: what the lengths of all tiles of rows need.
std::vector<View> adapter_products(const Context& context, const Linear& linear);
// saved.norms and saved.factors of the rows [first, first + weight.rows) of W, which `weight` holds.
void save_norms(const Context& context, const Linear& linear, const std::vector<View>& products,
                const View& weight, int64_t first, const LinearSaved& saved);

// y = (m / n) z (+ bias) (+ residual), z = saved.product.
void scale_output(const Context& context, const Linear& linear, const LinearForward& pass,
                  const LinearSaved& saved);
// y += (m / n) z - base of one adapter's rows: all views are of these.
void add_scaled(const Context& context, const View& z, const View& base, const View& y, const float* factors);

// The gradients of the magnitudes, and that of z in the arena: (m / n) dy [T, out]. `rest`: null, or becomes
// (m / n - 1) dy.
View scale_gradient(const Context& context, const Linear& linear, const View& dy, const LinearSaved& saved,
                    View* rest, bool first);

}  // namespace lm
