#include "optim/learning_rate.h"

#include <gtest/gtest.h>

#include <cmath>

#include "base/error.h"

namespace lm {
namespace {

struct Row {
  LrSchedule schedule;
  std::vector<double> factors;
};

constexpr int64_t kSteps[] = {0, 1, 3, 5, 6, 7, 15, 25, 36, 38, 39};

// From transformers 5.23: 40 steps, 6 of warm-up, lr 1e-3, 4 steps of decay, min_lr_rate (min_lr_ratio) 0.1
// for those that have one:
//   s = get_..._schedule...(torch.optim.SGD([p], lr=1e-3), ...); print(optimizer.param_groups[0]["lr"] /
//   1e-3)
const Row kRows[] = {
    {LrSchedule::kConstantWithWarmup, {0, 0.166666667, 0.5, 0.833333333, 1, 1, 1, 1, 1, 1, 1}},
    {LrSchedule::kLinear,
     {0, 0.166666667, 0.5, 0.833333333, 1, 0.970588235, 0.735294118, 0.441176471, 0.117647059, 0.0588235294,
      0.0294117647}},
    {LrSchedule::kCosine,
     {0, 0.166666667, 0.5, 0.833333333, 1, 0.997867088, 0.836847822, 0.408125241, 0.0337638853, 0.00851345016,
      0.00213291185}},
    {LrSchedule::kCosineWithMinLr,
     {0, 0.166666667, 0.5, 0.833333333, 1, 0.998080379, 0.85316304, 0.467312717, 0.130387497, 0.107662105,
      0.101919621}},
    {LrSchedule::kCosineWithRestarts,
     {0, 0.166666667, 0.5, 0.833333333, 1, 0.997867088, 0.836847822, 0.408125241, 0.0337638853, 0.00851345016,
      0.00213291185}},
    {LrSchedule::kCosineWarmupWithMinLr,
     {0.166666667, 0.333333333, 0.666666667, 1, 0.998080379, 0.992337895, 0.821185586, 0.426851654,
      0.117178461, 0.101919621, 0.1}},
    {LrSchedule::kPolynomial,
     {0, 0.166666667, 0.5, 0.833333333, 1, 0.970591176, 0.735320588, 0.441232353, 0.117735294, 0.0589176471,
      0.0295088235}},
    {LrSchedule::kInverseSqrt,
     {0, 0.166666667, 0.5, 0.833333333, 1, 0.9258201, 0.632455532, 0.489897949, 0.40824829, 0.397359707,
      0.39223227}},
    {LrSchedule::kWarmupStableDecay, {0.1, 0.25, 0.55, 0.85, 1, 1, 1, 1, 1, 0.55, 0.231801948}},
    {LrSchedule::kConstant, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}},
};

TEST(LearningRate, EveryScheduleIsTransformers) {
  for (const Row& row : kRows) {
    OptimizerConfig config;
    config.lr = 1e-3;
    config.schedule = row.schedule;
    config.warmup = 6;
    const bool floor = row.schedule == LrSchedule::kCosineWithMinLr ||
                       row.schedule == LrSchedule::kCosineWarmupWithMinLr ||
                       row.schedule == LrSchedule::kWarmupStableDecay;
    config.min_lr_ratio = floor ? 0.1 : 0;
    for (size_t i = 0; i < std::size(kSteps); ++i) {
      EXPECT_NEAR(schedule_factor(config, kSteps[i], 40), row.factors[i], 1e-8)
          << static_cast<int>(row.schedule) << " at step " << kSteps[i];
    }
  }
}

TEST(LearningRate, AWarmupBelowOneIsAFractionOfAllStepsRoundedUp) {
  OptimizerConfig config;
  config.warmup = 0.1;
  EXPECT_EQ(warmup_steps(config, 21), 3);
  config.warmup = 7;
  EXPECT_EQ(warmup_steps(config, 21), 7);
}

// torch.optim.lr_scheduler.ReduceLROnPlateau at its defaults: the 11th evaluation without progress divides
// by 10.
TEST(LearningRate, PlateauDividesByTenAfterItsPatience) {
  PlateauRate rate;
  rate.observe(2.0);
  rate.observe(1.0);
  for (int i = 0; i < 10; ++i) rate.observe(1.0);
  EXPECT_EQ(rate.factor(), 1.0);
  rate.observe(0.99999);
  EXPECT_DOUBLE_EQ(rate.factor(), 0.1);
}

// The shape stays, from 1 to the floor instead of from 1 to 0; the warm-up begins where it did.
TEST(LearningRate, MinLrRatioIsTheFloorOfEveryScheduleThatFalls) {
  for (const LrSchedule schedule :
       {LrSchedule::kLinear, LrSchedule::kCosine, LrSchedule::kCosineWithRestarts, LrSchedule::kPolynomial}) {
    OptimizerConfig plain, floored;
    plain.lr = floored.lr = 1e-3;
    plain.schedule = floored.schedule = schedule;
    plain.warmup = floored.warmup = 6;
    floored.min_lr_ratio = 0.2;
    for (int64_t t = 0; t <= 40; ++t) {
      const double x = schedule_factor(plain, t, 40);
      const double expected = t < 6 ? x : 0.2 + 0.8 * x;
      // polynomial falls to 1e-7 / lr = 1e-4 without a floor
      EXPECT_NEAR(schedule_factor(floored, t, 40), expected,
                  schedule == LrSchedule::kPolynomial ? 1e-4 : 1e-12)
          << static_cast<int>(schedule) << " at step " << t;
    }
    EXPECT_DOUBLE_EQ(schedule_factor(floored, 40, 40), 0.2);
  }
  OptimizerConfig root;
  root.schedule = LrSchedule::kInverseSqrt;
  root.warmup = 4;
  root.min_lr_ratio = 0.5;
  EXPECT_DOUBLE_EQ(schedule_factor(root, 9, 100), 1 / std::sqrt(9.0 / 4.0));
  EXPECT_DOUBLE_EQ(schedule_factor(root, 16, 100), 0.5);
  EXPECT_DOUBLE_EQ(schedule_factor(root, 99, 100), 0.5);
}

TEST(LearningRate, PolynomialOfNoRateIsANumber) {
  OptimizerConfig config;
  config.schedule = LrSchedule::kPolynomial;
  for (const double lr : {0.0, 1e-9}) {
    config.lr = lr;
    EXPECT_TRUE(std::isfinite(schedule_factor(config, 5, 10)));
    EXPECT_LE(schedule_factor(config, 5, 10), 1);
  }
}

TEST(LearningRate, PlateauStopsAtItsFloorAndWarmsUp) {
  OptimizerConfig config;
  config.schedule = LrSchedule::kReduceLrOnPlateau;
  config.warmup = 4;
  EXPECT_DOUBLE_EQ(schedule_factor(config, 1, 10), 0.25);
  EXPECT_DOUBLE_EQ(schedule_factor(config, 4, 10), 1);
  PlateauRate rate(0.03);
  for (int i = 0; i < 40; ++i) rate.observe(1.0);
  EXPECT_DOUBLE_EQ(rate.factor(), 0.03);
}

TEST(LearningRate, AWarmupThatIsLongerThanTheRunIsRefused) {
  OptimizerConfig config;
  config.warmup = 20;
  EXPECT_NO_THROW(check_schedule(config, 20));
  EXPECT_THROW(check_schedule(config, 19), Error);
  config.schedule = LrSchedule::kWarmupStableDecay;
  EXPECT_THROW(check_schedule(config, 20), Error);
  EXPECT_NO_THROW(check_schedule(config, 23));
}

}  // namespace
}  // namespace lm
