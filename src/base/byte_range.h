// Some of an array's bytes: one rank's, or a part that is fetched by itself.
#pragma once

#include <cstdint>

namespace lm {

// [begin, begin + bytes).
struct ByteRange {
  int64_t begin = 0, bytes = 0;
  int64_t end() const { return begin + bytes; }
};

}  // namespace lm
