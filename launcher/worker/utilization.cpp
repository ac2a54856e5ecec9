#include "launcher/worker/utilization.h"

#include <algorithm>

#include "launcher/machine/rates.h"

namespace lm {

double Utilization::operator()(const StepWork& work, double seconds) {
  const double rate = necessary_flops(job_.model.spec, job_.model.layout, work) / seconds;
  best_ = std::max(best_, rate);
  flops_ = std::max(flops_, rate);
  return rate / flops_;
}

void Utilization::keep() const {
  if (job_.stream.device != DeviceType::kCpu) return;
  const RateSubject subject{DeviceType::kCpu, job_.plan.numerics.dtype, job_.plan.numerics.threads};
  const std::string& cache = job_.environment.cache_dir;
  Machine known = job_.machine;
  if (!take_cached_rates(subject, cache, known) || gemm_flops(known, subject.dtype) >= best_) return;
  gemm_flops(known, subject.dtype) = best_;
  known.fastest_flops = std::max(known.fastest_flops, best_);
  // Other rates that were measured at that time, beside others' work, are as wrong.
  keep_rates(subject, known, cache, false);
}

}  // namespace lm
