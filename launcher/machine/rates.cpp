#include "launcher/machine/rates.h"

#include <type_traits>
#include <utility>

#include "launcher/machine/rate_cache.h"

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

// The measured rates of a machine, with their names in the cache.
template <class M, class V>
void visit_rates(M& machine, const RateSubject& subject, const V& rate) {
  rate("memory_bytes_per_s", machine.memory_bandwidth);
  if (subject.device == DeviceType::kCuda)
    return rate("link_bytes_per_s", machine.gpus.front().link_bandwidth);
  rate("gemm_flop_per_s", gemm_flops(machine, subject.dtype));
  rate("gemm_sustained", machine.gemm_sustained);
  rate("fastest_flop_per_s", machine.fastest_flops);
  rate("attention_flop_per_s", machine.attention_flops);
  rate("gemm_call_seconds", machine.gemm_call_seconds);
  rate("decoded_bytes_per_s", machine.decode_bandwidth);
  rate("library_bytes", machine.library_bytes);
}

}  // namespace

RateSubject rate_subject(const Config& config, const std::optional<NumericsPlan>& recorded, int64_t cores,
                         DeviceType device) {
  const DType dtype = storage_type(config.model.dtype);
  const auto threads = recorded ? recorded->threads : config.run.threads.value_or(cores);
  return {device, dtype, static_cast<int>(threads)};
}

bool take_cached_rates(const RateSubject& subject, const std::string& cache_dir, Machine& machine) {
  return read_figures(cache_dir, kFolder, key_of(machine, subject), [&](const Json& figures) {
    Machine known = machine;
    visit_rates(known, subject, [&](const char* name, auto& rate) {
      rate = static_cast<std::remove_reference_t<decltype(rate)>>(cached_rate(figures, name));
    });
    machine = std::move(known);
  });
}

void keep_rates(const RateSubject& subject, const Machine& machine, const std::string& cache_dir,
                bool certain) {
  Json figures;
  visit_rates(machine, subject, [&](const char* name, const auto& rate) { figures[name] = rate; });
  // Rates measured beside other work are not valid for a week.
  constexpr double kQuiet = 0.8;
  cache_figures(cache_dir, kFolder, key_of(machine, subject), figures,
                certain && machine.gemm_sustained >= kQuiet);
}

}  // namespace lm
