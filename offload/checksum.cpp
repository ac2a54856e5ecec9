#include "offload/checksum.h"

namespace lm {

// checksum_variant.cpp, compiled once per instruction set.
uint64_t checksum_baseline(const void* data, size_t bytes);
uint64_t checksum_avx2(const void* data, size_t bytes);
uint64_t checksum_avx512(const void* data, size_t bytes);

const std::vector<ChecksumVariant>& checksum_variants() {
  static const std::vector<ChecksumVariant> variants = [] {
    std::vector<ChecksumVariant> found{{"baseline", &checksum_baseline}};
#ifdef LM_X86_LEVELS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) found.push_back({"avx2", &checksum_avx2});
    if (__builtin_cpu_supports("avx512f")) found.push_back({"avx512", &checksum_avx512});
#endif
    return found;
  }();
  return variants;
}

uint64_t chunk_checksum(std::span<const std::byte> bytes) {
  static const auto run = checksum_variants().back().run;
  return run(bytes.data(), bytes.size());
}

}  // namespace lm
