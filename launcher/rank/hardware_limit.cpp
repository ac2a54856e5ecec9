#include "launcher/rank/hardware_limit.h"

#include <algorithm>

#include "launcher/machine/rates.h"

namespace lm {

double HardwareLimit::operator()(const StepWork& work, double seconds) {
  const bool lora = job_.model.adapter.has_value();
  const double rate = necessary_flops(job_.model.spec, job_.model.layout, lora, work) / seconds;
  best_ = std::max(best_, rate);
  flops_ = std::max(flops_, rate);
  return rate / flops_;
}

void HardwareLimit::keep() const {
  if (job_.stream.device != DeviceType::kCpu) return;
  const RateSubject subject = rate_subject(job_);
  const std::string& cache = job_.environment.cache_dir;
  std::optional<MeasuredRates> rates = known_rates(job_.machine, subject, cache);
  if (!rates || rates->gemm_flops >= best_) return;
  rates->gemm_flops = best_;
  rates->fastest_flops = std::max(rates->fastest_flops, best_);
  // What else was measured then, beside others' work, is as wrong.
  keep_rates(job_.machine, subject, *rates, cache, false);
}

}  // namespace lm
