// XXH3-64, the checksum of every chunk that is offloaded. The same value on every machine and on a GPU: only
// the speed depends on the instruction set. Any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/cuda.h"

namespace lm {

inline constexpr int64_t kChecksumChunk = 8192;  // bytes

uint64_t chunk_checksum(std::span<const std::byte> bytes);
// The checksum of a partial chunk, padded with zeros.
uint64_t padded_checksum(std::span<const std::byte> bytes);

// The checksums of an array's chunks, computed where it is: sums[i] is that of bytes [i * kChecksumChunk,
// ...). A partial last chunk is padded with zeros.
struct ChunkSums {
  const std::byte* bytes;  // aligned to 8
  int64_t size;            // in bytes
  uint64_t* sums;          // writable by the device that computes them
};
using ChunkSumsKernel = void (*)(const ChunkSums&, StreamView);
// For host memory, on the stream's threads; the GPU version is in the table of kernels (kernels/kernels.h).
void chunk_sums_cpu(const ChunkSums& args, StreamView stream);

}  // namespace lm
