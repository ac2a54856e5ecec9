// XXH3-64, the checksum of every chunk that leaves memory. The same value on every machine: only the speed
// depends on the instruction set. Any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lm {

uint64_t chunk_checksum(std::span<const std::byte> bytes);

}  // namespace lm
