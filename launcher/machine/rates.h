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

struct MeasuredRates {
  double gemm_flops = 0;      // of the CPU, where it computes: the best product
  double gemm_sustained = 1;  // the median product, as a share of it
  double fastest_flops = 0;   // of the CPU's products in whichever type is quickest
  double memory_bandwidth = 0;
  double attention_flops = 0;
  double gemm_call_seconds = 0;
  double decode_bandwidth = 0;
  int64_t library_bytes = 0;  // of the CPU's executable, as Machine has it
  double link_bandwidth = 0;  // with a GPU
};

std::optional<MeasuredRates> known_rates(const Machine& machine, const RateSubject& subject,
                                         const std::string& cache_dir);
// `certain` false: for an hour, whatever the rates themselves say of how busy the machine was.
void keep_rates(const Machine& machine, const RateSubject& subject, const MeasuredRates& rates,
                const std::string& cache_dir, bool certain = true);

// As the plan reads them.
void set_rates(const RateSubject& subject, const MeasuredRates& rates, Machine& machine);
// The known ones, if there are: a run must not be refused for what its plan was accepted for.
void set_known_rates(const RateSubject& subject, const std::string& cache_dir, Machine& machine);

}  // namespace lm
