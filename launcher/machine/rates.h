// Rates at which this machine computes and moves bytes, measured by the rank and cached; only the cost model
// needs them. Keyed by processor, threads, type and the versions of LibTorch and lmlaunch; valid for a week,
// or for an hour if the machine was busy. Any one thread.
#pragma once

#include <optional>
#include <string>

#include "base/dtype.h"
#include "config/config.h"
#include "plan/machine.h"
#include "plan/numerics.h"

namespace lm {

// The key of the rates.
struct RateSubject {
  DeviceType device = DeviceType::kCpu;
  DType dtype = DType::kBF16;
  int threads = 1;
};

// For a plan that is to be made, of a recorded run or a new one; `cores`: those of a rank.
RateSubject rate_subject(const Config& config, const std::optional<NumericsPlan>& recorded, int64_t cores,
                         DeviceType device);

// The best rate of the CPU's matrix products in that type.
auto& gemm_flops(auto& machine, DType dtype) {
  return dtype == DType::kBF16 ? machine.gemm_bf16_flops : machine.gemm_fp32_flops;
}

// Sets the machine's rates from the cache. False, without a change, if the cache does not have them.
bool take_cached_rates(const RateSubject& subject, const std::string& cache_dir, Machine& machine);
// `certain` false: for an hour, however busy the machine was by the rates themselves.
void keep_rates(const RateSubject& subject, const Machine& machine, const std::string& cache_dir,
                bool certain = true);

}  // namespace lm
