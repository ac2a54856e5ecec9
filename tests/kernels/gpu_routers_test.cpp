// The kernels around a mixture's experts on the GPU against the CPU's: the factor of a shared expert's rows.
#include "tests/kernels/gpu_support.h"
#include "tests/support/counts.h"

namespace lm {
namespace {

TEST_F(GpuKernels, RowsAreMultipliedByTheirGate) {
  int turn = 0;
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t rows : {0, 1, 15, 70}) {
      for (const int64_t width : {1, 24, 77, 1032}) {
        if (!test::full_counts() && ++turn % 2 == 0) continue;
        const int64_t shift = turn % 3 == 0;
        SCOPED_TRACE(name("gate", t, {rows, width, shift}));
        Arrays arrays = {with(noise(t, rows, 1, 3, shift), {1, -kInf, 2, kInf, -30}, 7)};
        for (uint32_t i = 0; i < 3; ++i) arrays.push_back(noise(t, rows * width, 2 + i, 1, shift));
        arrays.push_back(zeros(t, rows, shift));
        // Some rows are zero.
        for (int64_t j = 0; rows > 2 && j < width; ++j) arrays[2].values.set(width + j, 0);
        check(
            arrays,
            [&](const Kernels& k, StreamView s, const Pointers& p) {
              const View gate = view_of(p[0], t, rows, 1);
              k.gate_rows({.gate = gate, .x = view_of(p[1], t, rows, width)}, s);
              k.gate_rows({.gate = gate,
                           .x = view_of(p[2], t, rows, width),
                           .other = view_of(p[3], t, rows, width),
                           .dgate = view_of(p[4], t, rows, 1)},
                          s);
            },
            Want::kNear);
      }
    }
  }
}

}  // namespace
}  // namespace lm
