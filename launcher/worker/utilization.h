// Hardware utilization of a step, as a share of the machine's peak rate: its rate of matrix products in its
// fastest type (a run in a slower type does not use the hardware fully), measured in some tenths of a second;
// other work on the machine may have slowed the measurement. A step above that peak proves it wrong: the
// step's rate becomes the peak, for this run and in the cache. One thread. Borrows the job.
#pragma once

#include "launcher/worker/job.h"

namespace lm {

class Utilization {
 public:
  explicit Utilization(const Job& job) : job_(job), flops_(job.peak_flops) {}

  // Utilization of a step that did so much work in so many seconds; at most 1.
  double operator()(const StepWork& work, double seconds);

  // If steps have raised the peak rate, caches it for an hour; then all rates are measured again. GPUs have
  // theirs from their specification.
  void keep() const;

 private:
  const Job& job_;
  double best_ = 0;  // best step, FLOP/s
  double flops_;     // peak rate
};

}  // namespace lm
