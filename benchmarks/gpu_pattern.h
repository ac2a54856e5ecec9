// Memory of a GPU filled with a repeated pattern, for benchmarks: one tile of small numbers is sent and
// copied until all is full, which takes as long as writing it. A model's worth of fresh random weights would
// take minutes. Not zeros: those cost a GPU less power, and so less time, than real data.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/arena.h"
#include "base/bytes.h"
#include "base/cuda.h"

namespace lm {

class PatternTile {
 public:
  // The tile in device memory, of `dtype`: about N(0, deviation), or with deviation 0 all `mean`.
  PatternTile(DType dtype, StreamView stream, float deviation, float mean = 0, int64_t bytes = 4 * kMiB)
      : stream_(stream), tile_(stream.device, bytes) {
    std::vector<std::byte> host(static_cast<size_t>(bytes));
    uint32_t state = 12345;
    const auto draw = [&] {  // a sum of four uniform numbers is near enough to a normal one
      float sum = 0;
      for (int i = 0; i < 4; ++i) {
        state = state * 1664525U + 1013904223U;
        sum += static_cast<float>(state >> 8) * 0x1p-24f - 0.5f;
      }
      return mean + deviation * 1.7320508f * sum;
    };
    const auto size = static_cast<int64_t>(dtype_size(dtype));
    for (int64_t at = 0; at < bytes; at += size) {
      const float value = draw();
      uint32_t bits = 0;
      std::memcpy(&bits, &value, 4);
      const auto high = static_cast<uint16_t>(bits >> 16);
      std::memcpy(host.data() + at, dtype == DType::kF32 ? static_cast<const void*>(&value) : &high,
                  static_cast<size_t>(size));
    }
    copy_bytes(tile_.data(), host.data(), bytes, stream_);
    synchronize(stream_);  // `host` ends here
  }
  // Enqueued in the tile's stream; the tile must outlive that.
  void fill(void* to, int64_t bytes) const {
    for (int64_t at = 0; at < bytes; at += tile_.size())
      copy_bytes(static_cast<std::byte*>(to) + at, tile_.data(), std::min(tile_.size(), bytes - at), stream_);
  }

 private:
  StreamView stream_;
  Memory tile_;
};

}  // namespace lm
