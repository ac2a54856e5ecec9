// The router of a mixture of experts: what it reads, whom it chooses, and the gradients of that. Compute
// thread, stream order; memory is the arena's.
#pragma once

#include "model/mixers/experts.h"

namespace lm {

// Whether each expert's rows are padded: for a library that multiplies those of one expert at a time.
bool pads_rows(const Context& context);

// What the experts read of the mixer's input x [T, H]: where that is the residual stream, a norm of it.
// `rstd` [T, 1]: for backward; may be undefined.
View read_by_experts(const Context& context, const Experts& mixer, const View& x, const View& rstd);

// Fills saved.routing and saved.probability, of x.
void route(const Context& context, const Experts& mixer, const DeviceBatch& batch, const View& x,
           const Experts::Saved& saved);

// The gradient of the router's logits [T, E] from that of the slots' weights, which is used up, and of these
// weights' factors.
View logit_gradient(const Context& context, const Experts& mixer, const DeviceBatch& batch,
                    const Experts::Saved& saved, const View& dweight, bool first);

// From dlogits to the gradients of the router, of its norm, and of x. Where x is the residual stream dx has
// that of the experts, to which it is added; else it is overwritten. dx may be undefined.
struct RouterBackward {
  View x, dlogits, dx;
};
void router_backward(const Context& context, const Experts& mixer, const DeviceBatch& batch,
                     const RouterBackward& pass, bool first);

}  // namespace lm
