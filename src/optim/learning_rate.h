// Learning-rate schedules: the factor by which the peak rate is multiplied at a step. Pure functions of the
// step; formulas and edge cases are transformers', with steps counted from 0. optimizer.min_lr_ratio is the
// floor of every schedule that falls: what would fall to 0 falls to it, in the same shape.
#pragma once

#include <cstdint>

#include "config/config.h"

namespace lm {

// Warm-up steps out of `total`: optimizer.warmup, or the fraction of `total` (rounded up) when it is below 1.
int64_t warmup_steps(const OptimizerConfig& config, int64_t total);

// Factor at step `t` of `total`. Of reduce_lr_on_plateau this is the warm-up alone: PlateauRate's factor
// comes on top.
double schedule_factor(const OptimizerConfig& config, int64_t t, int64_t total);

// Throws Error(10) when the warm-up (and the decay of warmup_stable_decay) is longer than the run.
void check_schedule(const OptimizerConfig& config, int64_t total);

// torch's ReduceLROnPlateau at its defaults (factor 0.1, patience 10, relative threshold 1e-4) on the
// evaluation loss; the factor never falls below `floor`.
class PlateauRate {
 public:
  explicit PlateauRate(double floor = 0) : floor_(floor) {}
  void observe(double loss);
  double factor() const { return state_.factor; }
  // What evaluations so far have made of it.
  struct State {
    double best = 0;  // meaningful once seen > 0
    double factor = 1;
    int64_t bad = 0;  // evaluations without progress
    int64_t seen = 0;
  };
  const State& state() const { return state_; }
  void restore(const State& state) { state_ = state; }

 private:
  double floor_;
  State state_;
};

}  // namespace lm
