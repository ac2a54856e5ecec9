#include "offload/checksum.h"

#ifdef __x86_64__
#include <xxh_x86dispatch.h>  // XXH3_64bits becomes the one with this machine's widest vectors
#else
#include <xxhash.h>
#endif

namespace lm {

uint64_t chunk_checksum(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace lm
