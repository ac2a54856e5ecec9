// A row times a matrix, against fp64.
#include <array>

#include "tests/kernels/support.h"

namespace lm {
namespace {

TEST(MultiplyRow, IsTheProductOnEveryInstructionSetAndNumberOfThreads) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto& [rows, columns] : std::vector<std::array<int64_t, 2>>{
             {1, 1}, {3, 15}, {4, 16}, {5, 17}, {6, 577}, {130, 64}, {97, 1024}}) {
      SCOPED_TRACE(dtype_text(dtype) + " " + std::to_string(rows) + " x " + std::to_string(columns));
      const int64_t stride = columns + 3;
      const float scale = 0.75F;
      const Values x = Values::random(dtype, columns, 31), weight = Values::random(dtype, rows * stride, 32),
                   addend = Values::random(dtype, rows, 33);
      for (const bool adds : {false, true}) {
        const Outputs got = same_everywhere(
            [&](const Kernels& k, StreamView stream) {
              Values out = addend;
              k.multiply_row({.x = x.data(),
                              .weight = weight.data(),
                              .addend = adds ? out.data() : nullptr,
                              .out = out.data(),
                              .rows = rows,
                              .columns = columns,
                              .stride = stride,
                              .scale = scale,
                              .dtype = dtype},
                             stream);
              return Outputs{out};
            },
            Bits::kExp);  // the baseline has no fma
        std::vector<double> want;
        for (int64_t r = 0; r < rows; ++r) {
          double sum = 0;
          for (int64_t j = 0; j < columns; ++j) sum += x[j] * weight[r * stride + j];
          want.push_back(addend.rounded(scale * sum + (adds ? addend[r] : 0)));
        }
        expect_near(got[0], want, relative_bound(dtype), 2e-5, "product");
      }
    }
  }
}

}  // namespace
}  // namespace lm
