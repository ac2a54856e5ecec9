// How fast this machine computes and moves bytes, as the rank has measured it and the cache keeps it: the
// prediction of a step's time needs it, and nothing else. By processor, threads, type and the versions of
// LibTorch and lmlaunch; for a week, or for an hour where the machine was busy.
// Any one thread.
#pragma once

#include <optional>
#include <string>

#include "base/dtype.h"
#include "config/config.h"
#include "plan/machine.h"
#include "plan/numerics.h"

namespace lm {

// What the rates belong to.
struct RateSubject {
  DeviceType device = DeviceType::kCpu;
  DType dtype = DType::kBF16;
  int threads = 1;
};

// Of a plan that is to be made, of a recorded run or a new one; `cores`: those of a rank.
RateSubject rate_subject(const Config& config, const std::optional<NumericsPlan>& recorded, int64_t cores,
                         DeviceType device);

// Of the CPU's products in that type, the best.
auto& gemm_flops(auto& machine, DType dtype) {
  return dtype == DType::kBF16 ? machine.gemm_bf16_flops : machine.gemm_fp32_flops;
}

// The machine's rates for the subject, where the cache knows them. False, and nothing is changed, where it
// does not.
bool take_known_rates(const RateSubject& subject, const std::string& cache_dir, Machine& machine);
// `certain` false: for an hour, whatever the rates themselves say of how busy the machine was.
void keep_rates(const RateSubject& subject, const Machine& machine, const std::string& cache_dir,
                bool certain = true);

}  // namespace lm
