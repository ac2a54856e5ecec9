// Our own products of bf16 matrices, against fp64: whatever lies transposed, with rows that lie apart, over
// more than one panel each way.
#include <array>

#include "kernels/gemm_panels.h"
#include "tests/kernels/support.h"

namespace lm {
namespace {

constexpr int64_t kGap = 3;  // elements between rows, which no product may touch

Values with_gaps(int64_t rows, int64_t columns, uint32_t seed) {
  return Values::random(DType::kBF16, rows * (columns + kGap), seed);
}
View view(const Values& values, int64_t rows, int64_t columns) {
  return {const_cast<void*>(values.data()), DType::kBF16, rows, columns, columns + kGap};
}

TEST(Gemm, IsTheProductOnEveryInstructionSetAndNumberOfThreads) {
  constexpr int64_t kDeep = 2 * kPanelDepth + 5;
  for (const auto& [rows, columns, inner] :
       std::vector<std::array<int64_t, 3>>{{1, 1, 1},
                                           {5, 17, 3},
                                           {6, 16, 8},
                                           {7, 33, 9},
                                           {13, 40, kPanelDepth},
                                           {kPanelRows + 1, kTileColumns + 9, 21},
                                           {2 * kPanelRows - 4, 70, kDeep},
                                           {kTileRows + kPanelRows + 1, kTileColumns + 17, 21},
                                           {50, 2 * kTileColumns + 1, kDeep}}) {
    for (int way = 0; way < 8; ++way) {
      const bool transpose_a = way & 1, transpose_b = way & 2, adds = way & 4;
      SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(columns) + " x " + std::to_string(inner) +
                   (transpose_a ? " a^T" : "") + (transpose_b ? " b^T" : "") + (adds ? " added" : ""));
      const std::array<int64_t, 2> of_a = transpose_a ? std::array{inner, rows} : std::array{rows, inner},
                                   of_b =
                                       transpose_b ? std::array{columns, inner} : std::array{inner, columns};
      const Values a = with_gaps(of_a[0], of_a[1], 41), b = with_gaps(of_b[0], of_b[1], 42),
                   before = with_gaps(rows, columns, 43);
      const float scale = 0.75F, addend_scale = adds ? -1.5F : 1;
      const Outputs got = same_everywhere(
          [&](const Kernels& k, StreamView stream) {
            Values out = before;
            const View to = view(out, rows, columns);
            k.gemm({.a = view(a, of_a[0], of_a[1]),
                    .b = view(b, of_b[0], of_b[1]),
                    .out = to,
                    .addend = adds ? to : View{},
                    .transpose_a = transpose_a,
                    .transpose_b = transpose_b,
                    .scale = scale,
                    .addend_scale = addend_scale},
                   stream);
            return Outputs{out};
          },
          Bits::kExp);  // the baseline has no fma
      std::vector<double> want;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns + kGap; ++c) {
          const int64_t at = r * (columns + kGap) + c;
          double sum = 0;
          for (int64_t i = 0; c < columns && i < inner; ++i)
            sum += (transpose_a ? a[i * (rows + kGap) + r] : a[r * (inner + kGap) + i]) *
                   (transpose_b ? b[c * (inner + kGap) + i] : b[i * (columns + kGap) + c]);
          want.push_back(c < columns ? before.rounded(scale * sum + (adds ? addend_scale * before[at] : 0))
                                     : before[at]);
        }
      }
      expect_near(got[0], want, relative_bound(DType::kBF16), 2e-4, "product");
    }
  }
}

// The sum does not know how many rows or columns there are: a row's bits are the same in every batch.
TEST(Gemm, OfARowHasTheSameBitsInEveryBatch) {
  constexpr int64_t kRows = kPanelRows + 7, kColumns = 40, kInner = kPanelDepth + 11;
  const Values a = with_gaps(kRows, kInner, 44), b = with_gaps(kColumns, kInner, 45);
  const Kernels& k = kernels(DeviceType::kCpu);
  const auto product = [&](int64_t first, int64_t rows) {
    Values out(DType::kBF16, rows * (kColumns + kGap));
    k.gemm({.a = view(a, kRows, kInner).row_range(first, rows),
            .b = view(b, kColumns, kInner),
            .out = view(out, rows, kColumns),
            .transpose_b = true},
           {DeviceType::kCpu, nullptr, 2});
    return out;
  };
  const Values all = product(0, kRows);
  for (const int64_t row : {int64_t{0}, int64_t{5}, int64_t{kPanelRows}, kRows - 1}) {
    const Values alone = product(row, 1);
    for (int64_t c = 0; c < kColumns; ++c) EXPECT_EQ(alone[c], all[row * (kColumns + kGap) + c]) << row;
  }
}

}  // namespace
}  // namespace lm
