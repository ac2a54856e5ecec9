#include "base/checksum.h"

#ifdef __x86_64__
#include <xxh_x86dispatch.h>  // XXH3_64bits becomes the one with this machine's widest vectors
#else
#include <xxhash.h>
#endif

#include <algorithm>
#include <array>
#include <cstring>

#include "base/bytes.h"
#include "base/parallel.h"

namespace lm {
namespace {

// Waking a thread pays from about 100 us of work on.
constexpr int64_t kGrain = 128;

}  // namespace

uint64_t chunk_checksum(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

uint64_t padded_checksum(std::span<const std::byte> bytes) {
  if (std::ssize(bytes) == kChecksumChunk) return chunk_checksum(bytes);
  std::array<std::byte, kChecksumChunk> chunk{};
  std::memcpy(chunk.data(), bytes.data(), bytes.size());
  return chunk_checksum(chunk);
}

void chunk_sums_cpu(const ChunkSums& a, StreamView stream) {
  parallel_for(stream.threads, ceil_div(a.size, kChecksumChunk), kGrain, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t begin = chunk * kChecksumChunk;
      const auto length = static_cast<size_t>(std::min(kChecksumChunk, a.size - begin));
      a.sums[chunk] = padded_checksum({a.bytes + begin, length});
    }
  });
}

}  // namespace lm
