#include "optim/learning_rate.h"

#include <gtest/gtest.h>

namespace lm {
namespace {

struct Row {
  LrSchedule schedule;
  std::vector<double> factors;
};

constexpr int64_t kSteps[] = {0, 1, 3, 5, 6, 7, 15, 25, 36, 38, 39};

// From transformers 5.23: 40 steps, 6 of warm-up, min_lr_rate (min_lr_ratio) 0.1, lr 1e-3, 4 steps of decay:
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
    config.min_lr_ratio = 0.1;
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

}  // namespace
}  // namespace lm
