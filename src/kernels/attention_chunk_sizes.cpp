#include "base/bytes.h"
#include "kernels/attention_chunks.h"

namespace lm {
namespace {

constexpr int64_t kF32 = 4;

class Layout {
 public:
  void take(ChunkMemory::Area& area, int64_t elements, int64_t size = kF32) {
    area = {memory_.bytes, elements * size};
    memory_.bytes += round_up(area.bytes, 256);
  }
  ChunkMemory& memory() { return memory_; }

 private:
  ChunkMemory memory_;
};

}  // namespace

Chunk chunk_of(const ChunkShape& shape, int64_t length, int64_t scores) {
  const int64_t group = shape.group();
  // Rows of q and of the output are as wide as heads, so that no part of the memory is larger than scores.
  const int64_t for_heads = kEnoughChunkTokens * group * std::max(length, shape.head_dim);
  const int64_t kv_heads = std::clamp<int64_t>(scores / for_heads, 1, shape.kv_heads);
  const int64_t width = std::max(shape.seen(length), shape.head_dim);
  int64_t most = kMostChunkTokens;
  if (shape.window > 0) most = std::min(most, std::max(shape.window, kEnoughChunkTokens));
  return {kv_heads, std::clamp<int64_t>(scores / (kv_heads * group * width), 1, most)};
}

ChunkMemory chunk_memory(const ChunkShape& shape, int64_t scores) {
  const int64_t group = shape.group(), dim = shape.head_dim, all = shape.heads * shape.tokens;
  const int64_t keys = std::max<int64_t>(shape.seen(shape.keys), 1),
                element = static_cast<int64_t>(dtype_size(shape.dtype));
  // No more than of all rows; beyond `scores` only one token of one key head. (Tokens times keys may be more
  // than a number holds.)
  const auto of_rows = [&](int64_t width) {
    const int64_t most = std::max(scores, group * width);
    return all > most / width ? most : all * width;
  };
  const int64_t by_keys = of_rows(keys), by_dim = of_rows(dim);
  const int64_t side = std::min(shape.tokens, kMostChunkTokens);
  Layout out;
  ChunkMemory& m = out.memory();
  out.take(m.scores, by_keys);
  if (element != kF32) out.take(m.rounded, by_keys, element);
  out.take(m.q, by_dim, element);
  out.take(m.product, by_dim);
  for (ChunkMemory::Area* const area : {&m.top, &m.sum}) out.take(*area, by_dim / dim);
  out.take(m.later, side * side);
  if (shape.window > 0) out.take(m.earlier, side * side);
  if (!shape.backward) return m;
  if (shape.capped) out.take(m.probabilities, by_keys);
  out.take(m.gradient, by_keys);
  out.take(m.dout, by_dim, element);
  // Of a document's keys, for as many key heads as chunk_of lets through at once.
  const int64_t sums =
      std::min(shape.kv_heads * shape.tokens, std::max(shape.tokens, scores / (kEnoughChunkTokens * group)));
  for (ChunkMemory::Area* const area : {&m.dk, &m.dv}) out.take(*area, sums * dim);
  return m;
}

}  // namespace lm
