// CRC-32 as zlib and Ethernet have it: what the Python program can also compute, at some 2 GB/s without
// special instructions. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lm {

uint32_t crc32(std::span<const unsigned char> data);

}  // namespace lm
