// Activations, with a gate and without, against fp64: gelu_tanh by its definition with a tanh, which the
// kernels do not have. elementwise_test.cpp has more of SwiGLU.
#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "tests/kernels/support.h"

namespace lm {
namespace {

constexpr DType kBoth[] = {DType::kF32, DType::kBF16};

double silu(double x) {
  return x / (1 + std::exp(-x));
}
double gelu_tanh(double x) {
  return x / 2 * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
}
double relu2(double x) {
  return x > 0 ? x * x : 0;
}
double relu(double x) {
  return x > 0 ? x : 0;
}

struct Kind {
  Activation activation;
  const char* name;
  double (*value)(double);
  double slope(double x) const {  // small steps, which do not cross relu's corner
    const double h = x == 0 ? 1e-6 : std::min(1e-6, std::abs(x) / 2);
    return (value(x + h) - value(x - h)) / (2 * h);
  }
};
constexpr Kind kSilu{Activation::kSilu, "silu", silu}, kGelu{Activation::kGeluTanh, "gelu_tanh", gelu_tanh},
    kRelu2{Activation::kRelu2, "relu2", relu2}, kRelu{Activation::kRelu, "relu", relu};
constexpr Kind kKinds[] = {kSilu, kGelu, kRelu2, kRelu};

std::string text(const Kind& kind, DType dtype, int64_t n) {
  return std::string(kind.name) + " " + dtype_text(dtype) + " " + std::to_string(n);
}

// Where bf16's rounding of the activation may fall the other way, a product is off by that and its own.
double bound(DType dtype) {
  return 1.5 * relative_bound(dtype);
}

Values gated(const Kernels& k, StreamView stream, const Kind& kind, const Values& gate_up, int64_t rows) {
  Values out(gate_up.dtype(), gate_up.size() / 2);
  k.gated_forward({.gate_up = gate_up.data(),
                   .out = out.data(),
                   .rows = rows,
                   .ffn = out.size() / rows,
                   .activation = kind.activation,
                   .dtype = gate_up.dtype()},
                  stream);
  return out;
}
// {the gradient of gate and up, h}
Outputs gated_back(const Kernels& k, StreamView stream, const Kind& kind, Values gate_up, Values dh,
                   int64_t rows) {
  k.gated_backward({.gate_up = gate_up.data(),
                    .dh = dh.data(),
                    .rows = rows,
                    .ffn = dh.size() / rows,
                    .activation = kind.activation,
                    .dtype = dh.dtype()},
                   stream);
  return {gate_up, dh};
}
Values activated(const Kernels& k, StreamView stream, const Kind& kind, const Values& x) {
  Values out(x.dtype(), x.size());
  k.activation_forward({.x = x.data(),
                        .out = out.data(),
                        .elements = x.size(),
                        .activation = kind.activation,
                        .dtype = x.dtype()},
                       stream);
  return out;
}
// {dx, h}
Outputs activated_back(const Kernels& k, StreamView stream, const Kind& kind, Values x, Values dh) {
  k.activation_backward({.x = x.data(),
                         .dh = dh.data(),
                         .elements = x.size(),
                         .activation = kind.activation,
                         .dtype = x.dtype()},
                        stream);
  return {x, dh};
}

TEST(Gated, ForwardIsTheActivationOfGateTimesUp) {
  for (const Kind& kind : {kGelu, kRelu2}) {
    for (DType dtype : kBoth) {
      for (int64_t ffn : {1, 3, 64, 577}) {
        SCOPED_TRACE(text(kind, dtype, ffn));
        const int64_t rows = 71;
        const Values gate_up = Values::random(dtype, rows * 2 * ffn, 2, 3);
        const Outputs got =
            same_everywhere([&](const Kernels& k,
                                StreamView stream) { return Outputs{gated(k, stream, kind, gate_up, rows)}; },
                            Bits::kExp);
        std::vector<double> want;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t j = 0; j < ffn; ++j) {
            const int64_t g = r * 2 * ffn + j;
            want.push_back(gate_up.rounded(kind.value(gate_up[g])) * gate_up[g + ffn]);
          }
        }
        expect_near(got[0], want, bound(dtype), absolute_bound(dtype), "out");
      }
    }
  }
}

// As transformers, which has the activation and the product as two operations.
TEST(Gated, RoundsTheActivationAndThenTheProduct) {
  const int64_t n = 16 * 64 + 21;
  const Values gate = Values::random(DType::kBF16, n, 3, 2), up = Values::random(DType::kBF16, n, 4);
  Values gate_up(DType::kBF16, 2 * n);
  for (int64_t i = 0; i < n; ++i) gate_up.set(i, gate[i]), gate_up.set(n + i, up[i]);
  for (const Kind& kind : kKinds) {
    for (CpuLevel level : cpu_levels()) {
      SCOPED_TRACE(std::string(kind.name) + " " + cpu_level_name(level));
      const Kernels& k = cpu_kernels(level);
      const Values h = gated(k, {}, kind, gate_up, 1), a = activated(k, {}, kind, gate);
      const Outputs back = gated_back(k, {}, kind, gate_up, Values::random(DType::kBF16, n, 5), 1);
      Values want(DType::kBF16, n);
      int64_t seen = 0;  // elements on which one rounding is not two
      for (int64_t i = 0; i < n; ++i) {
        want.set(i, a[i] * up[i]);
        seen += want[i] != nearest_bf16(kind.value(gate[i]) * up[i]);
      }
      EXPECT_TRUE(h == want);
      EXPECT_TRUE(back[1] == want);
      // What ReLU gives needs no rounding.
      if (kind.name != kRelu.name) {
        EXPECT_GT(seen, n / 20);
      }
    }
  }
}

TEST(Gated, BackwardAgreesWithFiniteDifferencesAndLeavesTheForwardsOutput) {
  for (const Kind& kind : {kGelu, kRelu2}) {
    for (DType dtype : kBoth) {
      for (int64_t ffn : {1, 3, 64, 577}) {
        SCOPED_TRACE(text(kind, dtype, ffn));
        const int64_t rows = 35;
        const Values gate_up = Values::random(dtype, rows * 2 * ffn, 3, 2),
                     dh = Values::random(dtype, rows * ffn, 4);
        const Outputs got =
            same_everywhere([&](const Kernels& k,
                                StreamView stream) { return gated_back(k, stream, kind, gate_up, dh, rows); },
                            Bits::kExp);
        EXPECT_TRUE(got[1] ==
                    gated(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 1}, kind, gate_up, rows))
            << "h is made twice and must be the same";
        std::vector<double> want(static_cast<size_t>(gate_up.size()));
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t j = 0; j < ffn; ++j) {
            const int64_t g = r * 2 * ffn + j, u = g + ffn;
            const double d = dh[r * ffn + j];
            want[static_cast<size_t>(g)] = d * gate_up[u] * kind.slope(gate_up[g]);
            want[static_cast<size_t>(u)] = d * gate_up.rounded(kind.value(gate_up[g]));
          }
        }
        expect_near(got[0], want, bound(dtype), absolute_bound(dtype) * 2, "gradient");
      }
    }
  }
}

// 70001 elements are shared by three threads, whose parts begin at multiples of 64.
constexpr int64_t kSizes[] = {0, 1, 15, 16, 17, 63, 64, 65, 1000, 70001};

TEST(Activation, ForwardAlsoInPlace) {
  for (const Kind& kind : kKinds) {
    for (DType dtype : kBoth) {
      for (int64_t n : kSizes) {
        SCOPED_TRACE(text(kind, dtype, n));
        const Values x = Values::random(dtype, n, 6, 3);
        const Outputs got = same_everywhere(
            [&](const Kernels& k, StreamView stream) {
              Values in_place = x;
              k.activation_forward({.x = in_place.data(),
                                    .out = in_place.data(),
                                    .elements = n,
                                    .activation = kind.activation,
                                    .dtype = dtype},
                                   stream);
              return Outputs{activated(k, stream, kind, x), in_place};
            },
            Bits::kExp);
        std::vector<double> want;
        for (int64_t i = 0; i < n; ++i) want.push_back(kind.value(x[i]));
        expect_near(got[0], want, relative_bound(dtype), absolute_bound(dtype), "out");
        EXPECT_TRUE(got[1] == got[0]);
      }
    }
  }
}

TEST(Activation, BackwardAgreesWithFiniteDifferencesAndLeavesTheForwardsOutput) {
  for (const Kind& kind : kKinds) {
    for (DType dtype : kBoth) {
      for (int64_t n : kSizes) {
        SCOPED_TRACE(text(kind, dtype, n));
        const Values x = Values::random(dtype, n, 7, 2), dh = Values::random(dtype, n, 8);
        const Outputs got = same_everywhere(
            [&](const Kernels& k, StreamView stream) { return activated_back(k, stream, kind, x, dh); },
            Bits::kExp);
        EXPECT_TRUE(got[1] == activated(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 1}, kind, x))
            << "h is made twice and must be the same";
        std::vector<double> want;
        for (int64_t i = 0; i < n; ++i) want.push_back(dh[i] * kind.slope(x[i]));
        expect_near(got[0], want, relative_bound(dtype), absolute_bound(dtype) * 2, "dx");
      }
    }
  }
}

// Where 1 + tanh is a difference of two numbers near 1: a formula with it has no digit left of -5.
TEST(Activation, GeluKeepsItsDigitsFarBelowZero) {
  const int64_t n = 4000;
  Values x(DType::kF32, n), ones(DType::kF32, n);
  for (int64_t i = 0; i < n; ++i) x.set(i, -6 + 6 * static_cast<double>(i) / n), ones.set(i, 1);
  same_everywhere(
      [&](const Kernels& k, StreamView stream) {
        Outputs out = activated_back(k, stream, kGelu, x, ones);
        for (int64_t i = 0; i < n; ++i) {
          const double v = x[i], c = 2 * std::sqrt(2 / std::numbers::pi);
          const double s = 1 / (1 + std::exp(-c * (v + 0.044715 * v * v * v)));
          const double slope = s + v * s * (1 - s) * c * (1 + 0.134145 * v * v);
          EXPECT_NEAR(out[1][i], v * s, 6e-6 * std::abs(v * s)) << v;
          // The slope is 0 at -0.75.
          EXPECT_NEAR(out[0][i], slope, 6e-6 * std::abs(slope) + 1e-6 * s) << v;
        }
        return out;
      },
      Bits::kExp);
}

// {x, activation, slope}: what torch gives.
using Extreme = std::array<double, 3>;
void expect_extremes(const Kind& kind, std::span<const Extreme> extremes) {
  for (DType dtype : kBoth) {
    for (int64_t n : {11, 32, 64 + 11, 64 + 64}) {  // in parts, a single vector, and among four
      SCOPED_TRACE(text(kind, dtype, n));
      const int64_t first = n - std::ssize(extremes);
      Values x(dtype, n), ones(dtype, n), gate_up(dtype, 2 * n);
      for (int64_t i = 0; i < n; ++i) {
        x.set(i, i < first ? 0.5 : extremes[static_cast<size_t>(i - first)][0]);
        ones.set(i, 1), gate_up.set(i, x[i]), gate_up.set(n + i, 1);
      }
      const Outputs got = same_everywhere(
          [&](const Kernels& k, StreamView stream) {
            Outputs out = activated_back(k, stream, kind, x, ones);
            out.push_back(activated(k, stream, kind, x));
            out.push_back(gated(k, stream, kind, gate_up, 1));
            const Outputs back = gated_back(k, stream, kind, gate_up, ones, 1);
            out.insert(out.end(), back.begin(), back.end());
            return out;
          },
          Bits::kExp);
      for (int64_t i = 0; i < std::ssize(extremes); ++i) {
        const auto& [at, value, slope] = extremes[static_cast<size_t>(i)];
        const auto same = [](double a, double b) {
          return a == b || (std::isnan(a) && std::isnan(b)) || std::abs(a - b) <= 0.01 * std::abs(b);
        };
        for (size_t o : {1, 2, 3, 5}) EXPECT_TRUE(same(got[o][first + i], value)) << o << " of " << at;
        for (size_t o : {0, 4}) EXPECT_TRUE(same(got[o][first + i], slope)) << o << " of " << at;
        EXPECT_TRUE(same(got[4][n + first + i], value)) << "dup of " << at;
      }
      EXPECT_TRUE(std::isfinite(got[0][first - 1]));
    }
  }
}

constexpr double kInf = INFINITY, kNotANumber = NAN;

TEST(Activation, GeluOfHugeAndInfiniteNumbersIsTorchs) {
  constexpr Extreme kAll[] = {{-kInf, kNotANumber, kNotANumber},
                              {kInf, kInf, kNotANumber},
                              {kNotANumber, kNotANumber, kNotANumber},
                              {-1e30, 0, kNotANumber},
                              {1e30, 1e30, kNotANumber},
                              {-1e12, 0, 0},
                              {1e12, 1e12, 1},
                              {-1e4, 0, 0},
                              {1e4, 1e4, 1},
                              {0, 0, 0.5}};
  expect_extremes(kGelu, kAll);
}

TEST(Activation, Relu2OfHugeAndInfiniteNumbersIsTorchs) {
  constexpr Extreme kAll[] = {{-kInf, 0, 0}, {kInf, kInf, kInf}, {kNotANumber, kNotANumber, kNotANumber},
                              {-1e30, 0, 0}, {1e30, kInf, 2e30}, {1e12, 1e24, 2e12},
                              {0, 0, 0}};
  expect_extremes(kRelu2, kAll);
}

TEST(Activation, ReluOfHugeAndInfiniteNumbersIsTorchs) {
  constexpr Extreme kAll[] = {{-kInf, 0, 0}, {kInf, kInf, 1}, {-1e30, 0, 0}, {1e30, 1e30, 1}, {0, 0, 0}};
  expect_extremes(kRelu, kAll);
}

}  // namespace
}  // namespace lm
