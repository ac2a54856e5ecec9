#include "plan/flash_rate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "base/bytes.h"
#include "kernels/attention_chunks.h"

namespace lm {
namespace {

struct Pass {
  double share = 0, half_length = 0;
};
struct FlashRow {
  int major = 0;
  bool halved = false;
  int64_t largest_head = 0;
  Pass forward, backward;
};

#define LM_FLASH(major, halved, head, forward, forward_length, backward, backward_length) \
  FlashRow{major, halved, head, {forward, forward_length}, {backward, backward_length}},
constexpr auto kRows = std::to_array<FlashRow>({
#include "plan/flash_rates.inc"
});

// Keys of a block, and queries of one in forward, whatever the head's size.
constexpr double kBlock = 128;

// Of cards 12.x the kernels are those of 8.x: they have no multiplication of the data centre's chips.
const FlashRow* row_of(const Gpu& gpu, int64_t head_dim) {
  const bool halved = gpu.bf16_flops <= 2.5 * gpu.fp32_flops;
  const int major = gpu.capability.major >= 12 ? 8 : gpu.capability.major;
  const FlashRow* found = nullptr;
  for (const FlashRow& row : kRows) {
    if (row.major > major || row.halved != halved || row.largest_head < head_dim) continue;
    if (found == nullptr || row.major > found->major) found = &row;
  }
  return found;
}

}  // namespace

// Deterministic backward adds up dq of as many copies as it takes blocks of a pair, so it takes no more
// blocks than fill the card: each multiprocessor has one, and a second turn may be short.
double flash_fill(const FlashCall& call, int processors, bool deterministic) {
  if (processors <= 0 || call.pairs <= 0) return 1;
  const auto whole = std::max<int64_t>(std::llround(std::ceil(call.length / kBlock)), 1);
  const bool few = deterministic && call.backward;
  const int64_t of_pair = few ? std::min(ceil_div(int64_t{processors}, call.pairs), whole) : whole;
  const int64_t blocks = of_pair * call.pairs;
  const int64_t turns = ceil_div(blocks, int64_t{processors});
  // Blocks of many turns are of many lengths, and the last turn is a small part.
  if (!few && turns > 1) return 1;
  return static_cast<double>(blocks) / static_cast<double>(turns * processors);
}

std::function<double(const FlashCall&)> flash_rate(const Gpu& gpu, DType dtype, bool deterministic) {
  if (dtype_size(dtype) != 2 || gpu.bf16_flops <= 0 || gpu.capability.major < kFlashCapability) return {};
  return [gpu, deterministic](const FlashCall& call) {
    const FlashRow* const row = row_of(gpu, call.head_dim);
    if (row == nullptr || call.length <= 0) return 0.0;
    const Pass& pass = call.backward ? row->backward : row->forward;
    return gpu.bf16_flops * pass.share * (call.length / (call.length + pass.half_length)) *
           flash_fill(call, gpu.processors, deterministic);
  };
}

}  // namespace lm
