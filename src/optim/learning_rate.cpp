#include "optim/learning_rate.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace lm {
namespace {

constexpr double kPi = std::numbers::pi;
constexpr double kPolynomialEnd = 1e-7;  // absolute learning rate at the end
constexpr double kDecayShare = 0.1;      // of all steps, for warmup_stable_decay
constexpr int64_t kInverseSqrtTimescale = 10000;

}  // namespace

int64_t warmup_steps(const OptimizerConfig& config, int64_t total) {
  if (config.warmup >= 1) return static_cast<int64_t>(config.warmup);
  return static_cast<int64_t>(std::ceil(static_cast<double>(total) * config.warmup));
}

double schedule_factor(const OptimizerConfig& config, int64_t t, int64_t total) {
  const int64_t warmup = config.schedule == LrSchedule::kConstant ? 0 : warmup_steps(config, total);
  const auto step = static_cast<double>(t), w = static_cast<double>(warmup), n = static_cast<double>(total);
  const double floor = config.min_lr_ratio;
  if (config.schedule == LrSchedule::kCosineWarmupWithMinLr) {
    if (t < warmup) return (step + 1) / std::max(1.0, w);
    const double q = (step - w + 1) / std::max(1.0, n - w);
    return std::max(0.0, 0.5 * (1 + std::cos(kPi * q)) * (1 - floor) + floor);
  }
  if (t < warmup) {
    const double x = step / std::max(1.0, w);
    return config.schedule == LrSchedule::kWarmupStableDecay ? x * (1 - floor) + floor : x;
  }
  const double q = (step - w) / std::max(1.0, n - w);
  switch (config.schedule) {
    case LrSchedule::kLinear:
      return std::max(0.0, 1 - q);
    case LrSchedule::kCosine:
      return std::max(0.0, 0.5 * (1 + std::cos(kPi * q)));
    case LrSchedule::kCosineWithMinLr:
      return std::max(0.0, 0.5 * (1 + std::cos(kPi * q)) * (1 - floor) + floor);
    case LrSchedule::kCosineWithRestarts:
      return q >= 1 ? 0.0 : std::max(0.0, 0.5 * (1 + std::cos(kPi * std::fmod(q, 1.0))));
    case LrSchedule::kPolynomial:
      if (t > total) return kPolynomialEnd / config.lr;
      return ((config.lr - kPolynomialEnd) * (1 - q) + kPolynomialEnd) / config.lr;
    case LrSchedule::kInverseSqrt: {
      const double timescale = warmup > 0 ? w : static_cast<double>(kInverseSqrtTimescale);
      return 1 / std::sqrt((step + timescale - w) / timescale);
    }
    case LrSchedule::kWarmupStableDecay: {
      const double decay = std::ceil(n * kDecayShare);
      if (step < n - decay) return 1;
      const double x = std::min(1.0, (step - (n - decay)) / std::max(1.0, decay));
      return 0.5 * (1 + std::cos(kPi * x)) * (1 - floor) + floor;
    }
    default:
      return 1;  // constant, constant_with_warmup; plateau's factor comes from PlateauRate
  }
}

void PlateauRate::observe(double loss) {
  constexpr double kThreshold = 1e-4, kFactor = 0.1;
  constexpr int64_t kPatience = 10;
  if (seen_++ == 0 || loss < best_ * (1 - kThreshold)) {
    best_ = loss;
    bad_ = 0;
    return;
  }
  if (++bad_ > kPatience) {
    factor_ *= kFactor;
    bad_ = 0;
  }
}

void PlateauRate::visit_state(StateVisitor& visitor) {
  visitor.tensor("plateau.best", DType::kF64, {1}, std::as_writable_bytes(std::span(&best_, 1)));
  visitor.tensor("plateau.factor", DType::kF64, {1}, std::as_writable_bytes(std::span(&factor_, 1)));
  visitor.number("plateau.bad", bad_);
  visitor.number("plateau.seen", seen_);
}

}  // namespace lm
