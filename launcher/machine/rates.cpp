#include "launcher/machine/rates.h"

#include "launcher/machine/kept.h"

namespace lm {
namespace {

constexpr const char* kFolder = "rates";

Json key_of(const Machine& machine, const RateSubject& subject) {
  const bool gpu = subject.device == DeviceType::kCuda;
  return {{"cpu", machine.cpu_model},
          {"instructions", instructions_name(machine.instructions)},
          {"gpu", gpu ? machine.gpus.front().name : ""},
          {"cores", machine.cores},
          {"threads", subject.threads},
          {"dtype", dtype_name(subject.dtype)},
          {"libtorch", LM_TORCH_VERSION},
          {"lmlaunch", LM_VERSION}};
}

}  // namespace

RateSubject rate_subject(const Config& config, const std::optional<NumericsPlan>& recorded, int64_t cores,
                         DeviceType device) {
  const DType dtype = config.model.dtype == ModelDType::kBF16 ? DType::kBF16 : DType::kF32;
  const auto threads = recorded ? recorded->threads : config.run.threads.value_or(cores);
  return {device, dtype, static_cast<int>(threads)};
}

std::optional<MeasuredRates> known_rates(const Machine& machine, const RateSubject& subject,
                                         const std::string& cache_dir) {
  const std::optional<Json> json = kept_figures(cache_dir, kFolder, key_of(machine, subject));
  if (!json) return std::nullopt;
  try {
    MeasuredRates rates;
    rates.memory_bandwidth = kept_rate(*json, "memory_bytes_per_s");
    if (subject.device == DeviceType::kCuda) {
      rates.link_bandwidth = kept_rate(*json, "link_bytes_per_s");
    } else {
      rates.gemm_flops = kept_rate(*json, "gemm_flop_per_s");
      rates.gemm_sustained = kept_rate(*json, "gemm_sustained");
      rates.attention_flops = kept_rate(*json, "attention_flop_per_s");
      rates.gemm_call_seconds = kept_rate(*json, "gemm_call_seconds");
      rates.decode_bandwidth = kept_rate(*json, "decoded_bytes_per_s");
      rates.library_bytes = static_cast<int64_t>(kept_rate(*json, "library_bytes"));
    }
    return rates;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

void keep_rates(const Machine& machine, const RateSubject& subject, const MeasuredRates& rates,
                const std::string& cache_dir, bool certain) {
  Json figures = {{"memory_bytes_per_s", rates.memory_bandwidth}};
  if (subject.device == DeviceType::kCuda) {
    figures["link_bytes_per_s"] = rates.link_bandwidth;
  } else {
    figures["gemm_flop_per_s"] = rates.gemm_flops;
    figures["gemm_sustained"] = rates.gemm_sustained;
    figures["attention_flop_per_s"] = rates.attention_flops;
    figures["gemm_call_seconds"] = rates.gemm_call_seconds;
    figures["decoded_bytes_per_s"] = rates.decode_bandwidth;
    figures["library_bytes"] = rates.library_bytes;
  }
  // A machine with other work on it is no measure for the next week.
  constexpr double kQuiet = 0.8;
  keep_figures(cache_dir, kFolder, key_of(machine, subject), figures,
               certain && rates.gemm_sustained >= kQuiet);
}

void set_rates(const RateSubject& subject, const MeasuredRates& rates, Machine& machine) {
  machine.memory_bandwidth = rates.memory_bandwidth;
  if (subject.device == DeviceType::kCuda) {
    machine.gpus.front().link_bandwidth = rates.link_bandwidth;
  } else {
    (subject.dtype == DType::kBF16 ? machine.gemm_bf16_flops : machine.gemm_fp32_flops) = rates.gemm_flops;
    machine.gemm_sustained = rates.gemm_sustained;
    machine.attention_flops = rates.attention_flops;
    machine.gemm_call_seconds = rates.gemm_call_seconds;
    machine.decode_bandwidth = rates.decode_bandwidth;
    machine.library_bytes = rates.library_bytes;
  }
}

void set_known_rates(const RateSubject& subject, const std::string& cache_dir, Machine& machine) {
  if (const auto rates = known_rates(machine, subject, cache_dir)) set_rates(subject, *rates, machine);
}

}  // namespace lm
