#include "optim/learning_rate.h"

#include <fmt/format.h>
#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "base/error.h"

namespace lm {
namespace {

constexpr double kPi = std::numbers::pi;
constexpr double kPolynomialEnd = 1e-7;  // absolute learning rate at the end
constexpr double kDecayShare = 0.1;      // of all steps, for warmup_stable_decay
constexpr int64_t kInverseSqrtTimescale = 10000;

// The decay steps of warmup_stable_decay.
int64_t decay_steps(int64_t total) {
  return static_cast<int64_t>(std::ceil(static_cast<double>(total) * kDecayShare));
}

}  // namespace

int64_t warmup_steps(const OptimizerConfig& config, int64_t total) {
  if (config.warmup >= 1) return static_cast<int64_t>(config.warmup);
  return static_cast<int64_t>(std::ceil(static_cast<double>(total) * config.warmup));
}

double schedule_factor(const OptimizerConfig& config, int64_t t, int64_t total) {
  const int64_t warmup = config.schedule == LrSchedule::kConstant ? 0 : warmup_steps(config, total);
  const auto step = static_cast<double>(t), w = static_cast<double>(warmup), n = static_cast<double>(total);
  const double floor = config.min_lr_ratio;
  // From 1 down to the floor as x goes from 1 to 0.
  const auto above_floor = [&](double x) { return std::max(0.0, x * (1 - floor) + floor); };
  const auto cosine = [&](double q) { return above_floor(0.5 * (1 + std::cos(kPi * q))); };
  if (config.schedule == LrSchedule::kCosineWarmupWithMinLr) {
    return t < warmup ? (step + 1) / std::max(1.0, w) : cosine((step - w + 1) / std::max(1.0, n - w));
  }
  if (t < warmup) {
    const double x = step / std::max(1.0, w);
    return config.schedule == LrSchedule::kWarmupStableDecay ? above_floor(x) : x;
  }
  const double q = (step - w) / std::max(1.0, n - w);
  switch (config.schedule) {
    case LrSchedule::kLinear:
      return above_floor(std::max(0.0, 1 - q));
    case LrSchedule::kCosine:
    case LrSchedule::kCosineWithMinLr:
      return cosine(q);
    case LrSchedule::kCosineWithRestarts:
      return q >= 1 ? floor : cosine(std::fmod(q, 1.0));
    case LrSchedule::kPolynomial: {
      const double least = config.lr > 0 ? std::min(kPolynomialEnd / config.lr, 1.0) : 0.0;
      const double end = std::max(floor, least);
      return (1 - end) * std::max(0.0, 1 - q) + end;
    }
    case LrSchedule::kInverseSqrt: {
      const double timescale = warmup > 0 ? w : static_cast<double>(kInverseSqrtTimescale);
      return std::max(floor, 1 / std::sqrt((step + timescale - w) / timescale));
    }
    case LrSchedule::kWarmupStableDecay: {
      const auto decay = static_cast<double>(decay_steps(total));
      if (step < n - decay) return 1;
      return cosine(std::min(1.0, (step - (n - decay)) / std::max(1.0, decay)));
    }
    default:
      return 1;  // constant, constant_with_warmup; plateau's factor comes from PlateauRate
  }
}

void check_schedule(const OptimizerConfig& config, int64_t total) {
  const int64_t warmup = warmup_steps(config, total);
  const bool decays = config.schedule == LrSchedule::kWarmupStableDecay;
  const int64_t decay = decays ? decay_steps(total) : 0;
  if (warmup + decay <= total) return;
  const std::string last = decays ? fmt::format(" plus {} of decay (warmup_stable_decay)", decay) : "";
  throw Error(Exit::kConfig, {.area = "CONF-20",
                              .what = fmt::format("optimizer.warmup is {} steps{}, but the run has {} in all",
                                                  warmup, last, total),
                              .place = "optimizer.warmup",
                              .next = "lower optimizer.warmup, or train for more epochs or steps",
                              .kept = "nothing was trained"});
}

void PlateauRate::observe(double loss) {
  constexpr double kThreshold = 1e-4, kFactor = 0.1;
  constexpr int64_t kPatience = 10;
  if (state_.seen++ == 0 || loss < state_.best * (1 - kThreshold)) {
    state_.best = loss;
    state_.bad = 0;
    return;
  }
  if (++state_.bad > kPatience) {
    state_.factor = std::max(state_.factor * kFactor, floor_);
    state_.bad = 0;
  }
}

}  // namespace lm
