// SwiGLU, accumulation, bias and column sums against fp64. activation_test.cpp has the other activations.
#include <array>

#include "tests/kernels/support.h"

namespace lm {
namespace {

constexpr DType kBoth[] = {DType::kF32, DType::kBF16};

double silu(double x) {
  return x / (1 + std::exp(-x));
}

TEST(Swiglu, ForwardIsSiluOfGateTimesUp) {
  for (DType dtype : kBoth) {
    for (int64_t ffn : {1, 3, 64, 577}) {
      SCOPED_TRACE(dtype_text(dtype) + " ffn " + std::to_string(ffn));
      const int64_t rows = 71;
      Values gate_up = Values::random(dtype, rows * 2 * ffn, 2, 3);
      for (double extreme : {-200.0, 200.0, -88.5, 0.0})
        gate_up.set(static_cast<int64_t>(std::abs(extreme)) % gate_up.size(), extreme);
      const Outputs got = same_everywhere(
          [&](const Kernels& k, StreamView stream) {
            Values out(dtype, rows * ffn);
            k.gated_forward(
                {.gate_up = gate_up.data(), .out = out.data(), .rows = rows, .ffn = ffn, .dtype = dtype},
                stream);
            return Outputs{out};
          },
          Bits::kExp);
      std::vector<double> want;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = 0; j < ffn; ++j) {
          want.push_back(gate_up.rounded(silu(gate_up[r * 2 * ffn + j])) * gate_up[r * 2 * ffn + ffn + j]);
        }
      }
      expect_near(got[0], want, relative_bound(dtype) * 1.5, absolute_bound(dtype), "out");
    }
  }
}

TEST(Swiglu, BackwardAgreesWithFiniteDifferencesAndLeavesTheForwardsOutput) {
  for (DType dtype : kBoth) {
    for (int64_t ffn : {1, 3, 64, 577}) {
      SCOPED_TRACE(dtype_text(dtype) + " ffn " + std::to_string(ffn));
      const int64_t rows = 35;
      const Values gate_up = Values::random(dtype, rows * 2 * ffn, 3, 2),
                   dh = Values::random(dtype, rows * ffn, 4);
      const Outputs got = same_everywhere(
          [&](const Kernels& k, StreamView stream) {
            Values a = gate_up, b = dh;
            k.gated_backward({.gate_up = a.data(), .dh = b.data(), .rows = rows, .ffn = ffn, .dtype = dtype},
                             stream);
            return Outputs{a, b};
          },
          Bits::kExp);
      Values forward(dtype, rows * ffn);
      kernels(DeviceType::kCpu)
          .gated_forward(
              {.gate_up = gate_up.data(), .out = forward.data(), .rows = rows, .ffn = ffn, .dtype = dtype},
              {DeviceType::kCpu, nullptr, 1});
      EXPECT_TRUE(got[1] == forward) << "h is made twice and must be the same";
      std::vector<double> want(static_cast<size_t>(gate_up.size()));
      const double h = 1e-5;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = 0; j < ffn; ++j) {
          const int64_t g = r * 2 * ffn + j, u = g + ffn;
          const double d = dh[r * ffn + j];
          want[static_cast<size_t>(g)] =
              d * gate_up[u] * (silu(gate_up[g] + h) - silu(gate_up[g] - h)) / (2 * h);
          want[static_cast<size_t>(u)] = d * gate_up.rounded(silu(gate_up[g]));
        }
      }
      expect_near(got[0], want, relative_bound(dtype), absolute_bound(dtype) * 2, "gradient");
    }
  }
}

// What torch.nn.functional.silu and its gradient give.
TEST(Swiglu, InfiniteGatesGiveWhatTorchGives) {
  const double nan = std::nan(""), inf = INFINITY;
  for (DType dtype : kBoth) {
    for (int64_t ffn : {3, 19}) {  // the last three, of a whole vector and of a part
      Values gate_up(dtype, 2 * ffn), dh(dtype, ffn);
      for (int64_t j = 0; j < ffn; ++j) gate_up.set(ffn + j, 2), dh.set(j, 3);
      for (int64_t k = 0; k < 3; ++k)
        gate_up.set(ffn - 3 + k, std::array{-inf, inf, nan}[static_cast<size_t>(k)]);
      const Outputs got = same_everywhere(
          [&](const Kernels& k, StreamView stream) {
            Values a = gate_up, b = dh, h(dtype, ffn);
            k.gated_forward({.gate_up = a.data(), .out = h.data(), .rows = 1, .ffn = ffn, .dtype = dtype},
                            stream);
            k.gated_backward({.gate_up = a.data(), .dh = b.data(), .rows = 1, .ffn = ffn, .dtype = dtype},
                             stream);
            return Outputs{h, a, b};
          },
          Bits::kExp);
      for (const Values* h : {&got[0], &got[2]}) {
        EXPECT_TRUE(std::isnan((*h)[ffn - 3]) && (*h)[ffn - 2] == inf && std::isnan((*h)[ffn - 1]));
      }
      for (int64_t k = 0; k < 3; ++k) EXPECT_TRUE(std::isnan(got[1][ffn - 3 + k])) << "dgate " << k;
      EXPECT_TRUE(std::isnan(got[1][2 * ffn - 3]) && got[1][2 * ffn - 2] == inf) << "dup";
    }
  }
}

TEST(Accumulate, AddsOrReplacesInEveryPairOfTypesWithOneRounding) {
  for (DType to_dtype : kBoth) {
    for (DType from_dtype : kBoth) {
      for (int64_t n : {0, 1, 63, 64, 1000, 70001}) {
        for (bool overwrite : {false, true}) {
          const Values to = Values::random(to_dtype, n, 5), from = Values::random(from_dtype, n, 6);
          const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
            Values t = to;
            k.accumulate({.to = t.data(),
                          .from = from.data(),
                          .elements = n,
                          .to_dtype = to_dtype,
                          .from_dtype = from_dtype,
                          .overwrite = overwrite},
                         stream);
            return Outputs{t};
          });
          Values want(to_dtype, n);
          for (int64_t i = 0; i < n; ++i) {
            want.set(i, static_cast<double>(static_cast<float>(overwrite ? from[i] : to[i] + from[i])));
          }
          EXPECT_TRUE(got[0] == want)
              << dtype_text(to_dtype) << " from " << dtype_text(from_dtype) << ", n " << n;
        }
      }
    }
  }
}

TEST(Accumulate, RoundsTiesToEvenAndKeepsInfinityAndNan) {
  const float inputs[] = {1.00390625f, 1.01171875f, -1.00390625f, 3.4e38f, INFINITY,
                          -INFINITY,   NAN,         1e-40f,       -0.f};
  const uint16_t expected[] = {0x3F80, 0x3F82, 0xBF80, 0x7F80, 0x7F80, 0xFF80, 0x7FC0, 0x0001, 0x8000};
  const int64_t n = std::size(inputs);
  same_everywhere([&](const Kernels& k, StreamView stream) {
    Values out(DType::kBF16, n);
    k.accumulate({.to = out.data(),
                  .from = inputs,
                  .elements = n,
                  .to_dtype = DType::kBF16,
                  .from_dtype = DType::kF32,
                  .overwrite = true},
                 stream);
    EXPECT_EQ(std::memcmp(out.data(), expected, sizeof expected), 0);
    return Outputs{out};
  });
}

TEST(SumColumns, AddsSixtyFourRowsAtATimeInOrder) {
  for (DType dtype : kBoth) {
    for (int64_t rows : {0, 1, 64, 65, 300}) {
      for (int64_t width : {1, 3, 64, 577}) {
        const int64_t stride = width + 3;
        const Values x = Values::random(dtype, rows * stride, 7);
        const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
          Values sums(DType::kF32, width), partial(DType::kF32, (rows + 63) / 64 * width);
          k.sum_columns({.x = x.data(),
                         .sums = static_cast<float*>(sums.data()),
                         .partial = static_cast<float*>(partial.data()),
                         .rows = rows,
                         .width = width,
                         .stride = stride,
                         .dtype = dtype},
                        stream);
          return Outputs{sums};
        });
        Values want(DType::kF32, width);  // the documented order, in fp32: equal bit for bit
        for (int64_t j = 0; j < width; ++j) {
          float sum = 0;
          for (int64_t first = 0; first < rows; first += 64) {
            float part = 0;
            for (int64_t r = first; r < std::min(rows, first + 64); ++r)
              part += static_cast<float>(x[r * stride + j]);
            sum = first == 0 ? part : sum + part;
          }
          want.set(j, sum);
        }
        EXPECT_TRUE(got[0] == want) << dtype_text(dtype) << " " << rows << " x " << width;
      }
    }
  }
}

TEST(AddBias, AddsOneRowToEveryRow) {
  for (DType dtype : kBoth) {
    for (int64_t width : {1, 3, 64, 577}) {
      const int64_t rows = 67, stride = width + 2;
      const Values x = Values::random(dtype, rows * stride, 8), bias = Values::random(dtype, width, 9);
      const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
        Values y = x;
        k.add_bias({.x = y.data(),
                    .bias = bias.data(),
                    .rows = rows,
                    .width = width,
                    .stride = stride,
                    .dtype = dtype},
                   stream);
        return Outputs{y};
      });
      Values want = x;
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = 0; j < width; ++j)
          want.set(r * stride + j, static_cast<float>(x[r * stride + j] + bias[j]));
      }
      EXPECT_TRUE(got[0] == want) << dtype_text(dtype) << " width " << width;
    }
  }
}

}  // namespace
}  // namespace lm
