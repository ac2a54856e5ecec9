// Attention sinks and the clamped GLU against fp64, and MXFP4's codes.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "tests/kernels/support.h"

namespace lm {
namespace {

constexpr int64_t kTokens = 37, kHeads = 3;

struct Attended {
  Values out, sinks, dout;
  std::vector<float> lse;
};
// Sums far above and far below the sink, too.
Attended attended(DType dtype, int64_t head_dim) {
  Attended a{.out = Values::random(dtype, kTokens * kHeads * head_dim, 3),
             .sinks = Values::random(dtype, kHeads, 4),
             .dout = Values::random(dtype, kTokens * kHeads * head_dim, 5),
             .lse = {}};
  const Values lse = Values::random(DType::kF32, kTokens * kHeads, 6, 3);
  for (int64_t i = 0; i < lse.size(); ++i) a.lse.push_back(static_cast<float>(lse[i]));
  a.lse[0] = 90, a.lse[1] = -90;
  return a;
}

double joined(double lse, double z) {
  const double most = std::max(lse, z);
  return most + std::log(std::exp(lse - most) + std::exp(z - most));
}

TEST(Sinks, JoinEachRowsSumAndTakeTheirPartOfItsOutput) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t d : {1, 16, 67}) {
      SCOPED_TRACE(dtype_text(dtype) + ", head_dim " + std::to_string(d));
      const Attended a = attended(dtype, d);
      const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
        Values out = a.out, sinks = a.sinks, lse(DType::kF32, kTokens * kHeads);
        std::memcpy(lse.data(), a.lse.data(), a.lse.size() * sizeof(float));
        k.add_sinks({.sinks = sinks.data(),
                     .out = out.data(),
                     .lse = static_cast<float*>(lse.data()),
                     .tokens = kTokens,
                     .heads = kHeads,
                     .head_dim = d,
                     .dtype = dtype},
                    stream);
        return Outputs{out, lse};
      });
      std::vector<double> out(static_cast<size_t>(a.out.size())), lse(a.lse.size());
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t t = 0; t < kTokens; ++t) {
          const auto at = static_cast<size_t>(h * kTokens + t);
          lse[at] = joined(double{a.lse[at]}, a.sinks[h]);
          const double factor = std::exp(double{a.lse[at]} - lse[at]);
          for (int64_t j = 0; j < d; ++j) {
            const int64_t i = (t * kHeads + h) * d + j;
            out[static_cast<size_t>(i)] = factor * a.out[i];
          }
        }
      }
      expect_near(got[0], out, 2e-6 + relative_bound(dtype), 1e-30, "out");
      expect_near(got[1], lse, 1e-6, 1e-6, "lse");
    }
  }
}

TEST(Sinks, GradientIsWhatTheirPartOfTheSumTakesAway) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t d : {1, 16, 67}) {
      SCOPED_TRACE(dtype_text(dtype) + ", head_dim " + std::to_string(d));
      Attended a = attended(dtype, d);
      a.lse[1] = 2;  // no more than a few of the sink's own
      const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
        Values out = a.out, dout = a.dout, sinks = a.sinks, gradient(DType::kF32, kHeads);
        k.sinks_gradient({.sinks = sinks.data(),
                          .out = out.data(),
                          .dout = dout.data(),
                          .lse = a.lse.data(),
                          .gradient = static_cast<float*>(gradient.data()),
                          .tokens = kTokens,
                          .heads = kHeads,
                          .head_dim = d,
                          .dtype = dtype},
                         stream);
        return Outputs{gradient};
      });
      std::vector<double> gradient(static_cast<size_t>(kHeads));
      double size = 0;
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t t = 0; t < kTokens; ++t) {
          double dot = 0;
          for (int64_t j = 0; j < d; ++j) {
            const int64_t i = (t * kHeads + h) * d + j;
            dot += a.out[i] * a.dout[i];
          }
          const double p = std::exp(a.sinks[h] - double{a.lse[static_cast<size_t>(h * kTokens + t)]});
          gradient[static_cast<size_t>(h)] -= p * dot;
          size = std::max(size, std::abs(p * dot));
        }
      }
      expect_near(got[0], gradient, 1e-5, 1e-5 * size, "gradient");
    }
  }
}

struct Glu {
  double alpha = 1.702, limit = 0.7;
  double value(double gate, double up) const {
    const double g = std::min(gate, limit), u = std::clamp(up, -limit, limit);
    return (u + 1) * g / (1 + std::exp(-alpha * g));
  }
  // At a limit, too.
  double by_gate(double gate, double up) const {
    if (gate > limit) return 0;
    const double u = std::clamp(up, -limit, limit), s = 1 / (1 + std::exp(-alpha * gate));
    return (u + 1) * (s + alpha * gate * s * (1 - s));
  }
  double by_up(double gate, double up) const {
    if (std::abs(up) > limit) return 0;
    const double g = std::min(gate, limit);
    return g / (1 + std::exp(-alpha * g));
  }
};

TEST(ClampedGlu, LimitsGateAndUpWhichAreNeighbours) {
  constexpr int64_t kRows = 5;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t ffn : {1, 24, 67, 300}) {
      SCOPED_TRACE(dtype_text(dtype) + ", width " + std::to_string(ffn));
      Values both = Values::random(dtype, kRows * 2 * ffn, 7);
      const Values dh = Values::random(dtype, kRows * ffn, 8);
      const Glu glu{.alpha = 1.702, .limit = both.rounded(0.7)};
      both.set(0, glu.limit), both.set(1, -glu.limit);
      const Outputs got = same_everywhere(
          [&](const Kernels& k, StreamView stream) {
            Values x = both, h(dtype, kRows * ffn), d = dh;
            k.clamped_glu_forward({.gate_up = x.data(),
                                   .out = h.data(),
                                   .rows = kRows,
                                   .ffn = ffn,
                                   .alpha = 1.702F,
                                   .limit = static_cast<float>(glu.limit),
                                   .dtype = dtype},
                                  stream);
            k.clamped_glu_backward({.gate_up = x.data(),
                                    .dh = d.data(),
                                    .rows = kRows,
                                    .ffn = ffn,
                                    .alpha = 1.702F,
                                    .limit = static_cast<float>(glu.limit),
                                    .dtype = dtype},
                                   stream);
            return Outputs{h, d, x};
          },
          Bits::kExp);
      EXPECT_TRUE(got[0] == got[1]) << "h is another one in the backward pass";
      std::vector<double> h, gradient;
      for (int64_t i = 0; i < dh.size(); ++i) {
        const double gate = both[2 * i], up = both[2 * i + 1];
        h.push_back(glu.value(gate, up));
        gradient.push_back(dh[i] * glu.by_gate(gate, up));
        gradient.push_back(dh[i] * glu.by_up(gate, up));
      }
      if (ffn > 1) {
        EXPECT_GT(std::ranges::count(gradient, 0.0), ffn) << "nothing is limited";
      }
      expect_near(got[0], h, 2e-6 + relative_bound(dtype), 1e-6, "h");
      expect_near(got[2], gradient, 2e-6 + relative_bound(dtype), 1e-6, "gradients");
    }
  }
}

constexpr double kMagnitude[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

// All codes with all scales; beyond fp32's numbers is infinity.
TEST(Mxfp4, ACodeIsASmallFloatTimesAPowerOfTwo) {
  constexpr int64_t kRows = 256, kColumns = 64;
  std::vector<uint8_t> codes(kRows * kColumns / 2), scales(kRows * kColumns / kMxBlock);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i * 37 + i / 256);
  for (size_t i = 0; i < scales.size(); ++i) scales[i] = static_cast<uint8_t>(i * 7);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto materialised = [&](const Kernels& k, StreamView stream, int64_t first, int64_t columns) {
      Values out(dtype, kRows * columns);
      k.materialise({.kind = EncodingKind::kMxfp4,
                     .pieces = {reinterpret_cast<const std::byte*>(codes.data()),
                                reinterpret_cast<const std::byte*>(scales.data())},
                     .out = view_of(out.data(), dtype, kRows, columns),
                     .first = first,
                     .columns = kColumns},
                    stream);
      return out;
    };
    const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
      return Outputs{materialised(k, stream, 0, kColumns), materialised(k, stream, kMxBlock, kMxBlock)};
    });
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      const uint8_t two = codes[static_cast<size_t>(i / 2)];
      const int code = i % 2 == 0 ? two & 15 : two >> 4, exponent = scales[static_cast<size_t>(i / kMxBlock)];
      double want = std::ldexp(kMagnitude[code & 7] * (code >= 8 ? -1 : 1), exponent - 127);
      if (std::abs(want) >= std::ldexp(1.0, 128)) want = std::copysign(HUGE_VAL, want);
      ASSERT_EQ(got[0][i], want) << i;
      const int64_t row = i / kColumns, column = i % kColumns;
      if (column >= kMxBlock) {
        ASSERT_EQ(got[1][row * kMxBlock + column - kMxBlock], want) << i;
      }
    }
    EXPECT_THROW(materialised(kernels(DeviceType::kCpu), {DeviceType::kCpu, nullptr, 1}, 16, kMxBlock),
                 Error);
  }
}

}  // namespace
}  // namespace lm
