// XXH3-64, the checksum of every chunk that leaves memory. The same value on every machine: only the speed
// depends on the instruction set, chosen once at run time. Any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace lm {

uint64_t chunk_checksum(std::span<const std::byte> bytes);

// One build of the function per instruction set; for the test that all agree, and for benchmarks.
struct ChecksumVariant {
  const char* name;
  uint64_t (*run)(const void* data, size_t bytes);
};
// What this machine can run, slowest first; the last one is what `chunk_checksum` uses.
const std::vector<ChecksumVariant>& checksum_variants();

}  // namespace lm
