// Norms over rows (of H, or of each head's d), forward and explicit backward.
#pragma once

#include "model/linear.h"

namespace lm {

// A norm in use: its formula, its weight [width], and its bias, undefined where the formula has none.
struct Norm {
  NormSpec spec;
  Param weight;
  Param bias = {};
};

// What is normed: neighbouring vectors of `width` elements in a row. These are the whole row, or the heads of
// q or k in qkv.
struct Groups {
  int64_t groups = 1;
  int64_t width = 0;
  bool own = false;  // each has a weight of its own; of LayerNorms several groups must have
};

// out [T, groups * width] = norm(x); strides come from the tensors. `rstd` [T, groups] fp32 ([groups, T]
// where each has its own weight) may be undefined.
void norm_forward(const Context& context, const Norm& norm, const View& x, const View& out, const View& rstd,
                  Groups groups);
// The same of whole rows.
void norm_forward(const Context& context, const Norm& norm, const View& x, const View& out, const View& rstd);

// sum = x + residual, out = norm(sum); all [T, H].
struct ResidualNorm {
  View x, residual;
  View sum, out;
  View rstd;  // [T] fp32
};
void norm_forward_residual(const Context& context, const Norm& norm, const ResidualNorm& pass);

// sum = residual + factor * norm(x), each operation rounded to the model's type; all [T, H], residual and
// sum contiguous. With an undefined sum only rstd is computed.
struct AddedNorm {
  View x, residual;
  View sum;   // may be residual
  View rstd;  // [T] fp32; may be undefined
  float factor = 1;
};
void norm_forward_added(const Context& context, const Norm& norm, const AddedNorm& pass);

// dx = norm'(dy) (+ dresidual, when defined); the gradients of weight and bias are added, or overwritten when
// `first`. dx may be dy or dresidual.
struct NormBackward {
  View dy, x;
  View rstd;  // of the forward pass
  View dresidual = {};
  View dx;
};
void norm_backward(const Context& context, const Norm& norm, const NormBackward& pass, Groups groups,
                   bool first);
// The same of whole rows.
void norm_backward(const Context& context, const Norm& norm, const NormBackward& pass, bool first);

}  // namespace lm
