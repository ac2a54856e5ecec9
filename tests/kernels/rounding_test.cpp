// bf16 weights without a master: rounding is stochastic, unbiased, and lets a run learn whose every update is
// lost when rounded to nearest.
#include "base/philox.h"

#include "tests/kernels/support.h"

namespace lm {
namespace {

// One update of bf16 weights by gradient descent: p - lr * g, rounded.
void descend(Values& weight, Values& momentum, const Values& gradient, double lr, int64_t step) {
  kernels(DeviceType::kCpu)
      .update({.rule = Sgd::at({.momentum = 0}, {.lr = lr, .t = step}),
               .gradient = gradient.data(),
               .weight = weight.data(),
               .state = {static_cast<float*>(momentum.data())},
               .elements = weight.size(),
               .gradient_dtype = gradient.dtype(),
               .weight_dtype = DType::kBF16,
               .form = MasterForm::kStochastic,
               .rounding_key = philox_key(11, Purpose::kRounding, static_cast<uint64_t>(step), 2)},
              {});
}

TEST(StochasticRounding, IsUnbiasedOverTenMillionRoundings) {
  const int64_t n = 1 << 20, rounds = 10;
  const Values gradient = Values::random(DType::kF32, n, 5);
  // In units of each weight's last place: towards larger numbers, and away from 0, which signs do not cancel.
  double error = 0, outward = 0, variance = 0;
  for (int64_t round = 1; round <= rounds; ++round) {
    Values weight = Values::random(DType::kBF16, n, static_cast<uint32_t>(round), 0.02),
           momentum(DType::kF32, n);
    const Values before = weight;
    descend(weight, momentum, gradient, 1e-3, round);
    for (int64_t i = 0; i < n; ++i) {
      const auto exact =
          std::fma(-static_cast<float>(1e-3), static_cast<float>(gradient[i]), static_cast<float>(before[i]));
      int exponent = 0;
      std::frexp(exact, &exponent);
      const double unit = std::ldexp(1.0, exponent - 8), down = std::floor(std::abs(double{exact}) / unit);
      const double chance = std::abs(double{exact}) / unit - down;
      ASSERT_LT(std::abs(weight[i] - double{exact}), unit) << exact;
      error += (weight[i] - double{exact}) / unit;
      outward += (std::abs(weight[i]) - std::abs(double{exact})) / unit;
      variance += chance * (1 - chance);
    }
  }
  EXPECT_GT(variance, 0.1 * static_cast<double>(n * rounds));
  EXPECT_LE(std::abs(error), 3 * std::sqrt(variance));
  EXPECT_LE(std::abs(outward), 3 * std::sqrt(variance));
}

TEST(StochasticRounding, LearnsFromUpdatesBelowHalfAUnit) {
  // Every weight is to come from 1 to 2, a hundredth of a unit in the last place at most in a step.
  const int64_t n = 1 << 12;
  Values weight(DType::kBF16, n), momentum(DType::kF32, n), gradient(DType::kF32, n);
  for (int64_t i = 0; i < n; ++i) weight.set(i, 1);
  const double unit = 1.0 / 128, lr = 0.01 * unit;
  const int64_t steps = 6400;
  for (int64_t step = 1; step <= steps; ++step) {
    for (int64_t i = 0; i < n; ++i) gradient.set(i, weight[i] < 2 ? -1 : 0);
    ASSERT_EQ(nearest_bf16(1 + lr), 1) << "rounded to nearest, nothing would move";
    descend(weight, momentum, gradient, lr, step);
  }
  double mean = 0;
  for (int64_t i = 0; i < n; ++i) mean += weight[i] / static_cast<double>(n);
  EXPECT_NEAR(mean, 1 + lr * static_cast<double>(steps), 0.005);  // half of the way
}

}  // namespace
}  // namespace lm
