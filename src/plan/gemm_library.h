// What the CPU's GEMM library keeps: in bf16 it holds code and descriptions for every shape that it was
// given, up to a number that we set. Few different shapes, and that bound, keep a run's memory where it was
// planned.
#pragma once

#include <cstdint>

#include "plan/plan.h"
#include "spec/model_spec.h"
#include "spec/parameter.h"

namespace lm {

// Whether micro-batches are rounded up to few different numbers of rows.
bool rounds_rows(DType dtype, DeviceType device);

struct GemmLibrary {
  int64_t shapes = 0;  // that it may keep; 0: it keeps none
  int64_t bytes = 0;   // of host memory, for that
};
// Where making what a shape needs takes time that shows beside the work, the shapes of 12 different numbers
// of rows may stay; else those of one micro-batch, whose layers share them. `flops`: of the longest
// micro-batch, forward and backward.
GemmLibrary gemm_library(const ModelSpec& spec, const AdapterSpec* adapter, const NumericsPlan& numerics,
                         double flops);

}  // namespace lm
