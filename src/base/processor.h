// The vector instructions that the program uses: those of this processor, up to a limit that tests set
// (LM_CPU), so that a machine can stand for an older one. All code that dispatches by instructions uses this:
// kernels, attention, the GEMM library's limits, the plan. Any thread, once limit_instructions has been
// called.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace lm {

// In order of introduction. Each but Bf16 includes the ones before it: Cooper Lake has bf16 without VBMI, so
// test for the one you use.
enum class Instructions : uint8_t {
  kNone,        // what every 64-bit processor has
  kAvx2,        // and FMA
  kAvx512Core,  // F, BW, VL, DQ: Skylake, Cascade Lake
  kAvx512Vbmi,  // Ice Lake
  kAvx512Bf16,  // Zen 4, Cooper Lake
  kAmx,         // tiles of bf16: Sapphire Rapids
};

bool has_instructions(Instructions kind);
Instructions best_instructions();

// Disables kinds above `most`. Must precede every query.
void limit_instructions(Instructions most);

// "none", "avx2", "avx512_core", "avx512_vbmi", "avx512_bf16", "amx"; nullopt for another name.
const char* instructions_name(Instructions kind);
std::optional<Instructions> instructions_of(std::string_view name);
// The names that a limit may have, for messages.
std::string instructions_names();

// "NAME=value" for the environment of LibTorch's libraries, which dispatch by themselves: the same limit;
// empty if none is set. The libraries read these at their first use.
std::vector<std::string> library_limits();

}  // namespace lm
