// XXH3-64, the checksum of every chunk that leaves the memory it is computed on. The same value on every
// machine and on a GPU: only the speed depends on the instruction set. Any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/cuda.h"

namespace lm {

inline constexpr int64_t kChecksumChunk = 8192;  // bytes

uint64_t chunk_checksum(std::span<const std::byte> bytes);
// Of a chunk of which only the first bytes count: it is as if zeros filled it up.
uint64_t padded_checksum(std::span<const std::byte> bytes);

// The checksums of an array's chunks, taken where it lies: sums[i] is that of bytes [i * kChecksumChunk,
// ...). A last chunk that is not full is as if zeros filled it up.
struct ChunkSums {
  const std::byte* bytes;  // aligned to 8
  int64_t size;            // in bytes
  uint64_t* sums;          // where those who take them can write
};
using ChunkSumsKernel = void (*)(const ChunkSums&, StreamView);
// Of host memory, on the stream's threads; a GPU's is in the table of kernels (kernels/kernels.h).
void chunk_sums_cpu(const ChunkSums& args, StreamView stream);

}  // namespace lm
