// Learning-rate schedules: the factor of the peak rate at a step. Pure functions of the step; formulas and
// edge cases are transformers', with steps counted from 0. optimizer.min_lr_ratio is the floor of every
// decaying schedule: one that would decay to 0 decays to it, with the same shape.
#pragma once

#include <cstdint>

#include "config/config.h"

namespace lm {

// Warm-up steps out of `total`: optimizer.warmup, or the fraction of `total` (rounded up) when it is below 1.
int64_t warmup_steps(const OptimizerConfig& config, int64_t total);

// Factor at step `t` of `total`. For reduce_lr_on_plateau this is only the warm-up; PlateauRate has its
// factor.
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
  // Its state after the evaluations so far.
  struct State {
    double best = 0;  // meaningful once seen > 0
    double factor = 1;
    int64_t bad = 0;  // evaluations without improvement
    int64_t seen = 0;
  };
  const State& state() const { return state_; }
  void restore(const State& state) { state_ = state; }

 private:
  double floor_;
  State state_;
};

}  // namespace lm
