// Internals of the CPU attention, shared by attention_cpu.cpp (work list, threads, dispatch) and the files
// compiled for one instruction set. A path processes one tile of one (document, key head) pair at a time; all
// memory is the caller's. Tests select a path by name; other code calls the functions of kernels.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/kernels.h"

namespace lm::attention {

// A row is one (position, query head) of the pair: row = position * group + head in the group, so that a few
// neighbouring rows see nearly the same keys and grouped heads share each packed key tile.
inline constexpr int64_t kForwardRows = 192;  // rows of a forward tile
inline constexpr int64_t kBackwardRows =
    96;                                   // rows of a backward tile: P and dS of a tile stay in the L1 cache
inline constexpr int64_t kKeys = 64;      // keys of a key tile
inline constexpr int64_t kRowBlock = 6;   // rows of a register block: 6 x 4 accumulators of 32 registers
inline constexpr int64_t kMostRows = 32;  // of any path's block of rows
inline constexpr int64_t kKeyBlock = 4;   // keys of a register block in dK and dV
inline constexpr int64_t kMaxHeadDim = 512;

// One tile of rows of one pair.
struct Tile {
  int64_t document_begin = 0;   // first token
  int64_t document_length = 0;  // tokens
  int64_t kv_head = 0;
  int64_t row_begin = 0, row_end = 0;  // rows of the pair
};

// Per-thread memory, laid out for 4-byte lanes in every path, so that the size does not depend on the
// machine. `q` and the like have rows as left operands (k index contiguous), `_pairs` and `key_t` right
// operands.
struct ForwardScratch {
  std::byte* q;       // [kForwardRows, head_dim] lanes
  std::byte* key_t;   // [head_dim, kKeys]
  std::byte* value;   // [kKeys, width]
  std::byte* p;       // [kMostRows, kKeys]
  float* score;       // [kMostRows, kKeys]
  float* out;         // [kForwardRows, width]
  float* sum;         // [kForwardRows, 16]
  float* top;         // [kForwardRows]: the reference of exponents
  float* limit;       // [kForwardRows]: above this the reference moves
  int32_t* position;  // [kForwardRows], in the document
  const void** row;   // [kForwardRows]
};

struct BackwardScratch {
  std::byte *q, *dout;              // [kBackwardRows, head_dim]
  std::byte *q_pairs, *dout_pairs;  // [kBackwardRows, width]
  std::byte *key_t, *value_t;       // [head_dim, kKeys]
  std::byte* key;                   // [kKeys, width]
  std::byte* ds;                    // [kMostRows, kKeys]
  std::byte *p_pairs, *ds_pairs;    // [kBackwardRows, kKeys]
  float *score, *dp;                // [kMostRows, kKeys]
  float* dq;                        // [kBackwardRows, width]
  float *lse, *delta;               // [kBackwardRows]
  int32_t* position;
  const void** row;
};

// Memory shared by all threads of a backward pass.
struct BackwardShared {
  float *dk, *dv;  // [kv_heads, tokens, width]: sums in fp32
  int32_t* turn;   // [kv_heads, tokens]: at a key tile's first token, the number of row tiles added
};

// Width of a row of accumulators: head_dim rounded up to a vector.
constexpr int64_t padded(int64_t head_dim) {
  return (head_dim + 15) / 16 * 16;
}

// Waits until `*turn` is `value`. Row tiles are summed in order, whichever thread computes them.
void wait_turn(const int32_t* turn, int32_t value);

struct Path {
  const char* name;
  // Null if the path does not support the element type.
  void (*forward_f32)(const AttentionForward&, const Tile&, const ForwardScratch&);
  void (*forward_bf16)(const AttentionForward&, const Tile&, const ForwardScratch&);
  void (*forward_f16)(const AttentionForward&, const Tile&, const ForwardScratch&);
  void (*backward_f32)(const AttentionBackward&, const Tile&, const BackwardScratch&, const BackwardShared&);
  void (*backward_bf16)(const AttentionBackward&, const Tile&, const BackwardScratch&, const BackwardShared&);
  void (*backward_f16)(const AttentionBackward&, const Tile&, const BackwardScratch&, const BackwardShared&);
};

extern const Path kBaseline, kAvx2, kAvx512, kAvx512Bf16, kAmxBf16;

// The fastest usable path for `dtype`; by name ("baseline", "avx2", "avx512", "avx512_bf16",
// "amx_bf16") null if the machine or the element type does not support it.
const Path& best_path(DType dtype);
const Path* find_path(const char* name, DType dtype);

void forward(const Path& path, const AttentionForward& args, StreamView stream);
void backward(const Path& path, const AttentionBackward& args, StreamView stream);

}  // namespace lm::attention
