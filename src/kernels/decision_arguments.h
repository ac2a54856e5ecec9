// The arguments of a step's check, and what it decides (kernels.h has those of the other kernels, and the
// rules for all of them).
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "kernels/router_arguments.h"

namespace lm {

// What a step's check has decided, in device memory, where the step's updates read it.
struct StepDecision {
  double loss = 0;       // sum of nll / the step's divisor
  double correct = 0;    // targets that are the argmax of their logits
  double grad_norm = 0;  // before clipping, and without the loss scale
  // Of a skipped step: the last granule, counted over all blocks, whose norm is not finite, and its last
  // element that is not. -1: none.
  int64_t granule = -1, element = -1;
  float scale = 1;      // of the gradient in updates: clipping, and the loss scale's inverse
  int32_t skipped = 0;  // loss or norm not finite: the updates change nothing
  int32_t is_nan = 0;   // the element; else it is infinite
  int32_t unused = 0;
  RouterFigures routers;  // of a model with experts
};

// Steps whose decisions the host has not read; a step's are read while the next one is enqueued.
inline constexpr int64_t kDecisionsInFlight = 2;

// A part of the gradients in one array.
struct GradientArray {
  const void* gradient = nullptr;
  int64_t first_granule = 0;  // over all blocks
};

// Decides a step from its losses and granule_norms: adds each block's norms in order, then blocks in order,
// in fp64, so that the norm has the bits of every other way to add them.
struct Decide {
  const double* sums = nullptr;            // granule_norms of all blocks
  const int64_t* first_granule = nullptr;  // [blocks + 1]
  double* squares = nullptr;               // [blocks], overwritten
  int64_t blocks = 0;
  const GradientArray* arrays = nullptr;  // [array_count], in the order of their granules
  int64_t array_count = 0;
  const double* nll = nullptr;             // their sum
  const double* correct = nullptr;         // likewise
  const RouterFigures* routers = nullptr;  // copied; null: none
  double divisor = 0;                      // of nll
  double loss_scale = 1, max_grad_norm = 1;
  StepDecision* out = nullptr;
  DType gradient_dtype = DType::kF32;
};

}  // namespace lm
