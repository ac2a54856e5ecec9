// DoRA's kernels: the documented order written plainly, bit for bit on every instruction set.
#include "tests/kernels/support.h"

namespace lm {
namespace {

constexpr int64_t kRank = 5;

View view_of_values(Values& values, int64_t rows, int64_t columns, int64_t stride) {
  return {values.data(), values.dtype(), rows, columns, stride};
}

TEST(AdaptedNorms, AddSquaresAndTheProductInTheDocumentedOrder) {
  for (const DType weights : {DType::kF32, DType::kBF16}) {
    for (const DType adapters : {DType::kF32, DType::kBF16}) {
      for (const int64_t width : {1, 63, 64, 130, 577}) {
        constexpr int64_t kRows = 7;
        const int64_t stride = width + 3;
        Values weight = Values::random(weights, kRows * stride, 1),
               b = Values::random(adapters, kRows * kRank, 2), h = Values::random(adapters, kRows * kRank, 3),
               magnitude = Values::random(adapters, kRows, 4);
        for (int64_t k = 0; k < kRank; ++k) h.set(k, b[k] * -1e4);  // the first sum is below 0
        const float scale = 1.5f;
        const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
          Values norms(DType::kF32, kRows), factors(DType::kF32, kRows);
          k.adapted_norms({.weight = view_of_values(weight, kRows, width, stride),
                           .b = view_of_values(b, kRows, kRank, kRank),
                           .h = view_of_values(h, kRows, kRank, kRank),
                           .magnitude = magnitude.data(),
                           .scale = scale,
                           .norms = static_cast<float*>(norms.data()),
                           .factors = static_cast<float*>(factors.data())},
                          stream);
          return Outputs{norms, factors};
        });
        Values norms(DType::kF32, kRows), factors(DType::kF32, kRows);
        for (int64_t i = 0; i < kRows; ++i) {
          double lane[64] = {}, cross = 0;
          for (int64_t j = 0; j < width; ++j) lane[j % 64] += weight[i * stride + j] * weight[i * stride + j];
          for (int step = 32; step > 0; step /= 2)
            for (int l = 0; l < step; ++l) lane[l] += lane[l + step];
          for (int64_t k = 0; k < kRank; ++k) cross += b[i * kRank + k] * h[i * kRank + k];
          const double sum = lane[0] + static_cast<double>(scale) * cross;
          const auto norm = static_cast<float>(std::sqrt(sum < 0 ? 0 : sum));
          norms.set(i, norm);
          factors.set(i, static_cast<float>(magnitude[i]) / norm);
        }
        EXPECT_EQ(norms[0], 0);
        EXPECT_TRUE(got[0] == norms && got[1] == factors) << dtype_text(weights) << " " << width;
      }
    }
  }
}

TEST(ScaleColumns, AddsBiasAddendAndSubtrahendBeforeItRounds) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t width : {1, 3, 64, 577}) {
      constexpr int64_t kRows = 9;
      const int64_t stride = width + 2, n = kRows * stride;
      Values x = Values::random(dtype, n, 1), addend = Values::random(dtype, n, 2),
             less = Values::random(dtype, n, 3), bias = Values::random(dtype, width, 4),
             factors = Values::random(DType::kF32, width, 5);
      for (const bool all : {false, true}) {
        const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
          Values out = addend;
          const View to = view_of_values(out, kRows, width, stride);
          ScaleColumns a{.x = view_of_values(x, kRows, width, stride), .out = to};
          if (all) {
            a.factors = static_cast<const float*>(factors.data());
            a.bias = bias.data();
            a.addend = to;
            a.subtrahend = view_of_values(less, kRows, width, stride);
          }
          k.scale_columns(a, stream);
          return Outputs{out};
        });
        Values want = addend;
        for (int64_t r = 0; r < kRows; ++r) {
          for (int64_t j = 0; j < width; ++j) {
            const int64_t i = r * stride + j;
            auto v = static_cast<float>(x[i]);
            if (all) {
              v = static_cast<float>(factors[j]) * v;
              v = v + static_cast<float>(bias[j]);
              v = v + static_cast<float>(addend[i]);
              v = v - static_cast<float>(less[i]);
            }
            want.set(i, v);
          }
        }
        EXPECT_TRUE(got[0] == want) << dtype_text(dtype) << " " << width << (all ? " all" : "");
      }
    }
  }
}

TEST(ScaleColumnsBackward, AddsSixtyFourRowsAtATimeAndDividesByTheNorms) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t rows : {0, 1, 64, 65, 200}) {
      for (const int64_t width : {1, 67}) {
        const int64_t n = rows * width;
        Values dy = Values::random(dtype, n, 1), x = Values::random(dtype, n, 2),
               factors = Values::random(DType::kF32, width, 3), norms = Values::random(DType::kF32, width, 4);
        const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
          Values out(dtype, n), rest(dtype, n), sums(DType::kF32, width),
              partial(DType::kF32, (rows + 63) / 64 * width);
          k.scale_columns_backward({.dy = view_of_values(dy, rows, width, width),
                                    .x = view_of_values(x, rows, width, width),
                                    .out = view_of_values(out, rows, width, width),
                                    .rest = view_of_values(rest, rows, width, width),
                                    .factors = static_cast<const float*>(factors.data()),
                                    .norms = static_cast<const float*>(norms.data()),
                                    .sums = static_cast<float*>(sums.data()),
                                    .partial = static_cast<float*>(partial.data())},
                                   stream);
          return Outputs{out, rest, sums};
        });
        Values out(dtype, n), rest(dtype, n), sums(DType::kF32, width);
        for (int64_t j = 0; j < width; ++j) {
          const auto factor = static_cast<float>(factors[j]);
          float sum = 0;
          for (int64_t first = 0; first < rows; first += 64) {
            float part = 0;
            for (int64_t r = first; r < std::min(rows, first + 64); ++r) {
              const auto v = static_cast<float>(dy[r * width + j]);
              const float term = v * static_cast<float>(x[r * width + j]);
              part += term;
              out.set(r * width + j, factor * v);
              rest.set(r * width + j, (factor - 1) * v);
            }
            sum = first == 0 ? part : sum + part;
          }
          sums.set(j, rows == 0 ? 0 : sum / static_cast<float>(norms[j]));
        }
        EXPECT_TRUE(got[0] == out && got[1] == rest && got[2] == sums) << dtype_text(dtype) << " " << rows;
      }
    }
  }
}

}  // namespace
}  // namespace lm
