// XXH3 for one instruction set; the header picks its vectors by the compiler's target. Nothing but plain
// pointers here: a function shared with other files could end up in wide instructions for all of them.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstdint>

#define LM_JOIN(a, b) a##b
#define LM_NAME(isa) LM_JOIN(checksum_, isa)

namespace lm {

uint64_t LM_NAME(LM_ISA)(const void* data, size_t bytes);

uint64_t LM_NAME(LM_ISA)(const void* data, size_t bytes) {
  return XXH3_64bits(data, bytes);
}

}  // namespace lm
