// What stands around a mixture's experts: factors of a shared expert's rows, sums over choices, and the
// gradient of the loads' balance, against fp64.
#include <cmath>

#include "tests/kernels/support.h"

namespace lm {
namespace {

constexpr int64_t kRows = 37;

double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

TEST(Router, RowsAreMultipliedByTheirGateAndItsGradientIsThatOfTheSigmoid) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t width : {1, 24, 67}) {
      SCOPED_TRACE(dtype_text(dtype) + ", width " + std::to_string(width));
      const Values gate = Values::random(dtype, kRows, 3), x = Values::random(dtype, kRows * width, 4),
                   other = Values::random(dtype, kRows * width, 5);
      const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
        Values factor = gate, alone = x, with = x, mate = other, dgate(dtype, kRows);
        const View gates = view_of(factor.data(), dtype, kRows, 1);
        k.gate_rows({.gate = gates, .x = view_of(alone.data(), dtype, kRows, width)}, stream);
        k.gate_rows({.gate = gates,
                     .x = view_of(with.data(), dtype, kRows, width),
                     .other = view_of(mate.data(), dtype, kRows, width),
                     .dgate = view_of(dgate.data(), dtype, kRows, 1)},
                    stream);
        return Outputs{alone, with, dgate};
      });
      std::vector<double> scaled(static_cast<size_t>(x.size())), dgate(static_cast<size_t>(kRows));
      for (int64_t i = 0; i < x.size(); ++i) {
        const double s = sigmoid(gate[i / width]);
        scaled[static_cast<size_t>(i)] = s * x[i];
        dgate[static_cast<size_t>(i / width)] += x[i] * other[i] * s * (1 - s);
      }
      const double relative = relative_bound(dtype);
      expect_near(got[0], scaled, relative, 1e-6, "alone");
      expect_near(got[1], scaled, relative, 1e-6, "with the gradient");
      expect_near(got[2], dgate, relative, 1e-4, "dgate");
    }
  }
}

// Probabilities of rows, each of which adds up to 1.
std::vector<float> probabilities(int64_t tokens, int64_t experts) {
  const Values logits = Values::random(DType::kF32, tokens * experts, 6);
  std::vector<float> out(static_cast<size_t>(logits.size()));
  for (int64_t t = 0; t < tokens; ++t) {
    double sum = 0;
    for (int64_t e = 0; e < experts; ++e) sum += std::exp(logits[t * experts + e]);
    for (int64_t e = 0; e < experts; ++e)
      out[static_cast<size_t>(t * experts + e)] = static_cast<float>(std::exp(logits[t * experts + e]) / sum);
  }
  return out;
}

TEST(Router, ChoicesProbabilitiesAndEntropiesAreAddedUp) {
  constexpr int64_t kExperts = 5, kChosen = 2;
  std::vector<float> p = probabilities(kRows, kExperts);
  std::vector<int32_t> expert;
  for (int64_t s = 0; s < kRows * kChosen; ++s)
    expert.push_back(static_cast<int32_t>(s % 4));                                   // never the last
  std::vector<double> chosen(kExperts, 1), probability(kExperts, 2), entropy(1, 3);  // of what came before
  kernels(DeviceType::kCpu)
      .count_routes({.probability = view_of(p.data(), DType::kF32, kRows, kExperts),
                     .expert = expert.data(),
                     .chosen = kChosen,
                     .sums = {chosen.data(), probability.data(), entropy.data()}},
                    {DeviceType::kCpu, nullptr, 2});
  EXPECT_EQ(chosen, (std::vector<double>{20, 20, 19, 19, 1}));
  double sum = 0, of_all = 3;
  for (const double one : probability) sum += one - 2;
  EXPECT_NEAR(sum, kRows, 1e-4);
  for (const float one : p) of_all -= double{one} * std::log(double{one});
  EXPECT_NEAR(entropy[0], of_all, 1e-4);
}

TEST(Router, TheBalancesGradientIsThatOfProbabilitiesTimesLoads) {
  constexpr int64_t kSurplus = 2;
  constexpr float kFactor = 0.75;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t experts : {4, 33}) {
      SCOPED_TRACE(dtype_text(dtype) + ", experts " + std::to_string(experts));
      const std::vector<float> p = probabilities(kRows, experts);
      const Values before = Values::random(dtype, (kRows + kSurplus) * experts, 7);
      std::vector<float> fraction;
      for (int64_t e = 0; e < experts; ++e) fraction.push_back(0.1F * static_cast<float>(e % 3));
      const Outputs got = same_everywhere([&](const Kernels& k, StreamView stream) {
        Values dlogits = before;
        k.balance_routes({.probability = p.data(),
                          .fraction = fraction.data(),
                          .dlogits = view_of(dlogits.data(), dtype, kRows + kSurplus, experts),
                          .tokens = kRows,
                          .factor = kFactor},
                         stream);
        return Outputs{dlogits};
      });
      std::vector<double> expected;
      for (int64_t i = 0; i < before.size(); ++i) {
        const int64_t t = i / experts, e = i % experts;
        double mean = 0;
        for (int64_t j = 0; j < experts && t < kRows; ++j)
          mean += double{fraction[static_cast<size_t>(j)]} * double{p[static_cast<size_t>(t * experts + j)]};
        const double pushed = t < kRows ? double{kFactor} * double{p[static_cast<size_t>(i)]} *
                                              (double{fraction[static_cast<size_t>(e)]} - mean)
                                        : 0;
        expected.push_back(before[i] + pushed);
      }
      expect_near(got[0], expected, relative_bound(dtype), 1e-6, "dlogits");
    }
  }
}

}  // namespace
}  // namespace lm
