// Attention on GPUs for what LibTorch's kernels do not compute: soft caps, heads of more than 256 numbers,
// sinks where there is no flash attention, and on some cards the backward pass of heads of 193 to 224.
// Documents go through one by one, so many query rows at a time (a chunk): their scores of all keys that they
// see lie in memory, in fp32, between products of matrices. All memory is one allocation per call from
// LibTorch's allocator, of the size that is worked out here; the plan counts it. The result of a document
// depends on no other one. Works in the memory of any device; on the CPU for tests.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels/kernels.h"

namespace lm {

// LibTorch's kernels compute this attention on a GPU.
inline bool library_attends(int64_t head_dim, double softcap) {
  return softcap == 0 && head_dim <= 256;
}
// For heads of these sizes its backward pass in bf16 wants more shared memory than some cards have.
inline bool wants_shared_memory(int64_t head_dim) {
  return head_dim > 192 && head_dim <= 224;
}
// Cards of compute capability 8.6, 8.7, 8.9 and 12.x.
inline bool has_little_shared_memory(int major, int minor) {
  return major == 12 || (major == 8 && minor > 0);
}

// From this (major) compute capability on LibTorch has flash attention.
inline constexpr int kFlashCapability = 8;

// Scores of a chunk: 32 MiB, of which a GPU's cache holds a good part.
inline constexpr int64_t kChunkScores = 8 << 20;
// Tokens of a chunk that make products large enough: fewer heads at once rather than fewer tokens.
inline constexpr int64_t kEnoughChunkTokens = 128;
inline constexpr int64_t kMostChunkTokens = 1024;

// A call, as far as sizes go.
struct ChunkShape {
  int64_t tokens = 0;  // of all documents, at most
  int64_t keys = 0;    // of the longest document, earlier tokens included, at most
  int64_t heads = 1, kv_heads = 1, head_dim = 0;
  int64_t window = 0;
  bool capped = false, backward = false;
  DType dtype = DType::kF32;

  int64_t group() const { return heads / kv_heads; }
  // The most keys that a chunk's rows see in a document of so many.
  int64_t seen(int64_t length) const {
    return window > 0 ? std::min(length, window + std::max(window, kEnoughChunkTokens)) : length;
  }
};

template <class Args>
ChunkShape chunk_shape(const Args& a) {
  return {.tokens = a.tokens,
          .keys = a.documents.past + a.tokens,
          .heads = a.heads,
          .kv_heads = a.kv_heads,
          .head_dim = a.head_dim,
          .window = a.window,
          .capped = a.softcap > 0,
          .backward = std::is_same_v<Args, AttentionBackward>,
          .dtype = a.dtype};
}

// Key heads, with their query heads, and tokens of a document that go through at once. `scores`: the most of
// a chunk; one token of one key head may have more.
struct Chunk {
  int64_t kv_heads = 1, tokens = 1;
};
Chunk chunk_of(const ChunkShape& shape, int64_t length, int64_t scores = kChunkScores);

// Where the parts of a call's memory lie, in bytes; "rows" are pairs of a token and a query head.
struct ChunkMemory {
  struct Area {
    int64_t offset = 0, bytes = 0;
  };
  Area scores;          // fp32 [rows, keys]; P with no soft cap
  Area probabilities;   // fp32 [rows, keys]: P beside the capped scores, backward
  Area gradient;        // fp32 [rows, keys]: dP, dS; backward
  Area rounded;         // [rows, keys]: P, dS as factors of products; none in fp32
  Area q, dout;         // [rows, head_dim]
  Area product;         // fp32 [rows, head_dim]
  Area top, sum;        // fp32 [rows]
  Area later, earlier;  // fp32 [tokens, tokens] of a chunk: -inf where a key is hidden
  Area dk, dv;          // fp32 [keys, head_dim]: sums over the chunks of a document
  int64_t bytes = 0;
};
// Enough for all documents of the call, whatever their lengths; grows with tokens and keys.
ChunkMemory chunk_memory(const ChunkShape& shape, int64_t scores = kChunkScores);

// `args.scratch` is not used.
void attention_forward_chunks(const AttentionForward& args, StreamView stream, int64_t scores = kChunkScores);
void attention_backward_chunks(const AttentionBackward& args, StreamView stream,
                               int64_t scores = kChunkScores);

}  // namespace lm
