// What the CPU's GEMM library keeps: in bf16 it holds code and descriptions for every shape that it was
// given, up to a number that we set. Few different shapes, and that bound, keep a run's memory where it was
// planned.
#pragma once

#include <cstdint>

#include "base/cuda.h"
#include "base/dtype.h"
#include "plan/machine.h"

namespace lm {

// Whether micro-batches are rounded up to few different numbers of rows.
bool rounds_rows(DType dtype, DeviceType device, const Machine& machine);

// How many shapes it may keep.
struct GemmShapes {
  int64_t least = 0;  // those of one micro-batch, whose layers share them
  int64_t wanted =
      0;  // where making one takes time that shows beside the work: of 12 different numbers of rows
};
// `micro`: of one micro-batch (dry_run.h); `flops`: of the longest one, forward and backward. `trains`
// false: forward alone.
GemmShapes kept_shapes(int64_t micro, double flops, bool trains);

// Host memory for one. Measured with shapes from 64 x 64 to 576 x 8192: 0.60 to 0.66 MiB while all stay, 0.73
// to 0.86 where new ones take the place of old ones all the time; 0.89 with AMX, of 216 shapes of a run whose
// rows had 32 to 2048 tokens.
int64_t gemm_shape_bytes(const Machine& machine);

// Host memory in which all threads together make our own products.
int64_t gemm_panel_bytes(DType dtype, const Machine& machine, int threads);

}  // namespace lm
