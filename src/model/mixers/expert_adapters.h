// A matrix of an expert with its rows, in one run or, where ranks divide the experts, in a run for each rank
// that has some, and none is empty: y = x Wᵀ, with a pair of low rank
// y = x (W + s B A)ᵀ, and the gradients. What the pair reduces, A x, is not kept from forward to backward,
// which makes it again: r of the matrix's rows' worth of work, and no memory that lasts. The product with the
// whole B A, which peft adds to all experts' matrices in every pass, is never made. Where the host knows how
// many rows an expert has, and of whom: on CPUs, and where ranks divide the experts. Else expert_products.h.
#pragma once

#include <span>

#include "model/linear.h"

namespace lm {

void expert_forward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                    std::span<const LinearForward> runs);
// dx = dy (W + s B A).
void expert_input_gradient(const Context& context, const Linear& linear, const DeviceBatch& batch,
                           std::span<const LinearBackward> runs);
// How a product joins the gradient that is there.
enum class GradientSum : uint8_t {
  kOverwritten,
  kAdded,
  kAddedWhole,  // once it is made: with the bits of two sums that are added
};
// The gradients of what is trained, and dx, which may be undefined, as linear_backward.
void expert_backward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                     std::span<const LinearBackward> runs, GradientSum sum);
// Of an expert without rows.
void zero_pair_gradients(const Context& context, const Linear& linear);

}  // namespace lm
