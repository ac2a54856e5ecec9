#include "base/processor.h"

#include <atomic>

namespace lm {
namespace {

constexpr Instructions kAll[] = {Instructions::kNone,       Instructions::kAvx2,
                                 Instructions::kAvx512Core, Instructions::kAvx512Vbmi,
                                 Instructions::kAvx512Bf16, Instructions::kAmx};

std::atomic<Instructions> limit = Instructions::kAmx;

bool processor_has(Instructions kind) {
#if defined(__x86_64__)
  const auto core = [] {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  };
  switch (kind) {
    case Instructions::kNone:
      return true;
    case Instructions::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Instructions::kAvx512Core:
      return core();
    case Instructions::kAvx512Vbmi:
      return core() && __builtin_cpu_supports("avx512vbmi");
    case Instructions::kAvx512Bf16:
      return core() && __builtin_cpu_supports("avx512bf16");
    case Instructions::kAmx:
      return core() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-tile") &&
             __builtin_cpu_supports("amx-bf16");
  }
#endif
  return kind == Instructions::kNone;
}

}  // namespace

bool has_instructions(Instructions kind) {
  return kind <= limit.load(std::memory_order_relaxed) && processor_has(kind);
}

Instructions best_instructions() {
  Instructions best = Instructions::kNone;
  for (const Instructions kind : kAll) {
    if (has_instructions(kind)) best = kind;
  }
  return best;
}

void limit_instructions(Instructions most) {
  limit = most;
}

const char* instructions_name(Instructions kind) {
  switch (kind) {
    case Instructions::kNone:
      return "none";
    case Instructions::kAvx2:
      return "avx2";
    case Instructions::kAvx512Core:
      return "avx512_core";
    case Instructions::kAvx512Vbmi:
      return "avx512_vbmi";
    case Instructions::kAvx512Bf16:
      return "avx512_bf16";
    case Instructions::kAmx:
      return "amx";
  }
  return "";
}

std::optional<Instructions> instructions_of(std::string_view name) {
  for (const Instructions kind : kAll) {
    if (name == instructions_name(kind)) return kind;
  }
  return std::nullopt;
}

std::string instructions_names() {
  std::string out;
  for (const Instructions kind : kAll)
    out += (out.empty() ? "" : ", ") + std::string(instructions_name(kind));
  return out;
}

std::vector<std::string> library_limits() {
  switch (limit.load(std::memory_order_relaxed)) {
    case Instructions::kNone:
      return {"ONEDNN_MAX_CPU_ISA=SSE41", "MKL_ENABLE_INSTRUCTIONS=SSE4_2", "ATEN_CPU_CAPABILITY=default"};
    case Instructions::kAvx2:
      return {"ONEDNN_MAX_CPU_ISA=AVX2", "MKL_ENABLE_INSTRUCTIONS=AVX2", "ATEN_CPU_CAPABILITY=avx2"};
    case Instructions::kAvx512Core:
    case Instructions::kAvx512Vbmi:
      return {"ONEDNN_MAX_CPU_ISA=AVX512_CORE"};
    case Instructions::kAvx512Bf16:
      return {"ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"};
    case Instructions::kAmx:
      break;
  }
  return {};
}

}  // namespace lm
