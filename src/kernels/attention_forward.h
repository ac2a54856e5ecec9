// One tile of the forward pass, for any instruction set: for each key tile in order, scores of a few rows at
// a time, online softmax in fp32, and their product with the values. For the files of one instruction set
// only.
#pragma once

#include <cmath>

#include "kernels/attention_micro.h"

namespace lm::attention {
namespace {

inline constexpr float kLog2E = 1.44269504088896341f;
// Exponents are relative to a reference that moves only when a score exceeds it by 2^8: fp32 sums have the
// range, and most key tiles need neither a horizontal maximum nor a rescaled output.
inline constexpr float kSlack = 8;

// What the scores of a tile are multiplied by, lazily, as the exponents are made: with a soft cap they are
// complete before.
template <class Args>
float rest_of_scale(const Args& a) {
  return a.softcap > 0 ? 1.0f : a.scale;
}

// Rows of a tile computed at once, padded: rows past the end repeat the last one's position and read zeros.
struct RowBlock {
  int64_t begin;  // row in the tile
  Span span;      // keys in the key tile that some row sees
  int64_t key0;
  bool partly_masked;  // some row does not see all of the span
};

template <class Isa>
RowBlock row_block(const int32_t* position, int64_t begin, int64_t key0, int64_t window) {
  const int64_t first = position[begin], last = position[begin + Isa::kRows - 1];
  RowBlock block{begin, visible_span(first, last, key0, window, Isa::kKeyGrain), key0, false};
  block.partly_masked =
      key0 + block.span.end - 1 > first || (window > 0 && key0 + block.span.begin <= last - window);
  return block;
}

// The block's scores, q·k until now, become cap * tanh(scale * q·k / cap).
template <class Isa>
[[gnu::noinline]] void cap_scores(float* score, const Span& span, float scale, float cap) {
  const typename Isa::V factor = Isa::splat_float(scale / cap), most = Isa::splat_float(cap);
  for (int64_t m = 0; m < Isa::kRows; ++m) {
    for (int64_t k = span.begin; k < span.end; k += Isa::kWidth) {
      float* const x = score + m * kKeys + k;
      Isa::store(x, Isa::tanh(Isa::load(x) * factor) * most);
    }
  }
}

template <class Isa>
void move_reference(const ForwardScratch& s, int64_t row, float top, float scale2, int64_t width) {
  const float factor = s.top[row] == -INFINITY ? 0.0f : std::exp2((s.top[row] - top) * scale2);
  s.top[row] = top;
  s.limit[row] = top + kSlack / scale2;
  const auto splat = Isa::splat_float(factor);
  for (int64_t i = 0; i < width; i += Isa::kWidth) {
    float* out = s.out + row * width + i;
    Isa::store(out, Isa::load(out) * splat);
  }
  float* sum = s.sum + row * 16;
  Isa::store(sum, Isa::load(sum) * splat);
}

template <class Isa, bool kMasked>
[[gnu::noinline]] void softmax_rows(const ForwardScratch& s, const RowBlock& block, float scale2,
                                    int64_t window, int64_t width) {
  using V = typename Isa::V;
  auto* p = reinterpret_cast<typename Isa::Lane*>(s.p);
  for (int64_t m = 0; m < Isa::kRows; ++m) {
    const int64_t row = block.begin + m;
    const float* score = s.score + m * kKeys;
    const int64_t end = s.position[row] + 1 - block.key0;
    const int64_t begin = window > 0 ? end - window : 0;
    V top = Isa::splat_float(-INFINITY);
    for (int64_t k = block.span.begin; k < block.span.end; k += Isa::kWidth) {
      V x = Isa::load(score + k);
      if constexpr (kMasked) x = Isa::keep(x, k, begin, end, -INFINITY);
      top = Isa::larger(top, x);
    }
    if (Isa::any_above(top, s.limit[row])) move_reference<Isa>(s, row, Isa::largest(top), scale2, width);
    const V offset = Isa::splat_float(-s.top[row] * scale2), factor = Isa::splat_float(scale2);
    V sum = Isa::load(s.sum + row * 16);
    for (int64_t k = block.span.begin; k < block.span.end; k += Isa::kWidth) {
      V e = Isa::exp2(Isa::load(score + k) * factor + offset);
      if constexpr (kMasked) e = Isa::keep(e, k, begin, end, 0);
      sum = sum + e;
      Isa::store_keys(p + (m * kKeys + k) / Isa::kStep, e);
    }
    Isa::store(s.sum + row * 16, sum);
  }
}

template <class Isa>
void finish_forward(const AttentionForward& a, const Tile& tile, const ForwardScratch& s) {
  using Element = typename Isa::Element;
  const int64_t group = a.heads / a.kv_heads, width = padded(a.head_dim);
  const float scale = rest_of_scale(a);
  for (int64_t r = 0; r < tile.row_end - tile.row_begin; ++r) {
    const int64_t token = tile.document_begin + s.position[r];
    const int64_t head = tile.kv_head * group + (tile.row_begin + r) % group;
    const float sum = Isa::total(Isa::load(s.sum + r * 16));
    a.lse[head * a.tokens + token] = s.top[r] * scale + std::log(sum);
    auto* out = static_cast<Element*>(a.out) + (token * a.heads + head) * a.head_dim;
    Isa::store_row(out, s.out + r * width, 1 / sum, a.head_dim);
  }
}

// Positions and addresses of a tile's rows; rows past the end repeat the last position.
struct HeadsOf {
  const void* data;         // [tokens, heads, head_dim]
  int64_t stride;           // elements from token to token
  int64_t group, head_dim;  // heads per key-value head
};
template <class Isa>
int64_t list_rows(const HeadsOf& of, const Tile& tile, int32_t* position, const void** row) {
  const int64_t group = of.group, rows = tile.row_end - tile.row_begin;
  const int64_t all = (rows + Isa::kRows - 1) / Isa::kRows * Isa::kRows;
  for (int64_t r = 0; r < all; ++r) {
    const int64_t at = tile.row_begin + smaller(r, rows - 1);
    const int64_t head = tile.kv_head * group + at % group;
    if (position != nullptr) position[r] = static_cast<int32_t>(at / group);
    row[r] = static_cast<const typename Isa::Element*>(of.data) +
             (tile.document_begin + at / group) * of.stride + head * of.head_dim;
  }
  return all;
}

template <class Isa>
void forward_tile(const AttentionForward& a, const Tile& tile, const ForwardScratch& s) {
  using Lane = typename Isa::Lane;
  using Element = typename Isa::Element;
  const int64_t dim = a.head_dim, width = padded(dim), lanes = dim / Isa::kStep;
  const int64_t rows = tile.row_end - tile.row_begin;
  const float scale2 = rest_of_scale(a) * kLog2E;
  auto *q = reinterpret_cast<Lane*>(s.q), *key_t = reinterpret_cast<Lane*>(s.key_t);
  auto *value = reinterpret_cast<Lane*>(s.value), *p = reinterpret_cast<Lane*>(s.p);

  const int64_t all = list_rows<Isa>({a.q, a.q_stride, a.heads / a.kv_heads, dim}, tile, s.position, s.row);
  Isa::pack_left(q, s.row, rows, all, dim);
  for (int64_t i = 0; i < all * width; i += Isa::kWidth) Isa::store(s.out + i, Isa::zero());
  for (int64_t i = 0; i < all * 16; i += Isa::kWidth) Isa::store(s.sum + i, Isa::zero());
  for (int64_t r = 0; r < all; ++r) s.top[r] = s.limit[r] = -INFINITY;

  const int64_t first_key = a.window > 0 ? larger(0, s.position[0] - a.window + 1) / kKeys * kKeys : 0;
  for (int64_t key0 = first_key; key0 <= s.position[all - 1]; key0 += kKeys) {
    const int64_t keys = smaller(kKeys, tile.document_length - key0);
    const int64_t at = (tile.document_begin + key0) * a.kv_stride + tile.kv_head * dim;
    Isa::pack_transposed(key_t, static_cast<const Element*>(a.k) + at, a.kv_stride, keys, dim);
    Isa::pack_keys(value, static_cast<const Element*>(a.v) + at, a.kv_stride, keys, dim, width);
    for (int64_t r = 0; r < all; r += Isa::kRows) {
      const RowBlock block = row_block<Isa>(s.position, r, key0, a.window);
      const int64_t begin = block.span.begin, count = block.span.end - begin;
      if (count <= 0) continue;
      multiply_rows<Isa>({q + r * lanes, lanes, 1}, {key_t + begin, kKeys}, lanes,
                         {s.score + begin, kKeys, false}, count);
      if (a.softcap > 0) cap_scores<Isa>(s.score, block.span, a.scale, a.softcap);
      if (block.partly_masked)
        softmax_rows<Isa, true>(s, block, scale2, a.window, width);
      else
        softmax_rows<Isa, false>(s, block, scale2, a.window, width);
      multiply_rows<Isa>({p + begin / Isa::kStep, kKeys / Isa::kStep, 1},
                         {value + begin / Isa::kStep * width, width}, count / Isa::kStep,
                         {s.out + r * width, width, true}, width);
    }
  }
  finish_forward<Isa>(a, tile, s);
}

}  // namespace
}  // namespace lm::attention
