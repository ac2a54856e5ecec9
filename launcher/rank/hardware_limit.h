// What share of the hardware's limit a step reaches. The limit is the machine's rate of products in its
// quickest type (a run in a slow one does not use what there is), as it was measured in some tenths of a
// second; a machine that others use, too, may have been slower just then. A step that beats it proves it
// wrong: the limit moves to that step, for this run and for what is kept. One thread. Borrows the job.
#pragma once

#include "launcher/rank/job.h"

namespace lm {

class HardwareLimit {
 public:
  explicit HardwareLimit(const Job& job) : job_(job), flops_(job.peak_flops) {}

  // The share that a step of so much work in so many seconds reaches; at most 1.
  double operator()(const StepWork& work, double seconds);

  // Keeps the rate for later starts where steps have raised it, for an hour: then all are measured anew. GPUs
  // have theirs from their specification.
  void keep() const;

 private:
  const Job& job_;
  double best_ = 0;  // of a step, FLOP/s
  double flops_;     // the limit
};

}  // namespace lm
