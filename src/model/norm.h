// Norms over rows (of H, or of each head's d), forward and explicit backward.
#pragma once

#include "model/linear.h"

namespace lm {

// What is normed, and by which formula: neighbouring vectors of `width` elements in a row. These are the
// whole row (groups = 1), or the heads of q and k in qkv.
struct Groups {
  NormKind kind;
  int64_t groups;
  int64_t width;
};

// out [T, groups * width] = w * x * rstd; strides come from the tensors. `rstd` [T, groups] fp32 may be
// undefined.
void norm_forward(const Context& context, const Param& norm, const View& x, const View& out, const View& rstd,
                  Groups groups);

// sum = x + residual, out = norm(sum).
void norm_forward_residual(const Context& context, NormKind kind, const Param& norm, const View& x,
                           const View& residual, const View& sum, const View& out, const View& rstd);

// dx = norm'(dy) (+ dresidual, when defined); the weight's gradient is added. dx may be dy or dresidual.
void norm_backward(const Context& context, const Param& norm, const View& dy, const View& x, const View& rstd,
                   const View& dresidual, const View& dx, Groups groups, bool first);

}  // namespace lm
