// IA3: trained factors of what a linear layer computes, or of what it reads. y = l (W x + b) by rows of W,
// and of an MLP's last layer y = W (l x) + b. The weights are frozen. model/linear.cpp calls these halves;
// memory is the caller's and the arena's.
#pragma once

#include "model/linear.h"

namespace lm {

// Whether outputs or inputs are scaled.
bool has_scales(const Linear& linear);

// As linear_forward and linear_backward; saved.product is W x + b before outputs are scaled. With an
// undefined y only that is computed.
void scales_forward(const Context& context, const Linear& linear, const DeviceBatch& batch,
                    const LinearForward& pass, LinearSaved& saved);
void scales_backward(const Context& context, const Linear& linear, const LinearBackward& pass,
                     const LinearSaved& saved, bool first);

}  // namespace lm
