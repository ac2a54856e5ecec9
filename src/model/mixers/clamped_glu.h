// The activation of experts: gated, or a clamped GLU (spec/mixers/experts.h).
#pragma once

#include "model/mixers/activated.h"

namespace lm {

// h [rows, I] of gate_up [rows, 2I].
inline void activate(const Context& context, const ExpertsSpec& spec, const View& gate_up, const View& h) {
  if (!spec.clamped) return gated_forward(context, spec.activation, gate_up, h);
  context.kernels.clamped_glu_forward({.gate_up = gate_up.data,
                                       .out = h.data,
                                       .rows = h.rows,
                                       .ffn = h.columns,
                                       .alpha = static_cast<float>(spec.clamped->alpha),
                                       .limit = static_cast<float>(spec.clamped->limit),
                                       .dtype = context.dtype},
                                      context.stream);
}

// From dh to the gradient of gate_up, which takes its place; h takes dh's.
inline void activate_backward(const Context& context, const ExpertsSpec& spec, const View& gate_up,
                              const View& dh) {
  if (!spec.clamped) return gated_backward(context, spec.activation, gate_up, dh);
  context.kernels.clamped_glu_backward({.gate_up = gate_up.data,
                                        .dh = dh.data,
                                        .rows = dh.rows,
                                        .ffn = dh.columns,
                                        .alpha = static_cast<float>(spec.clamped->alpha),
                                        .limit = static_cast<float>(spec.clamped->limit),
                                        .dtype = context.dtype},
                                       context.stream);
}

}  // namespace lm
