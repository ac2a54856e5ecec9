// One tile of rows of the backward pass, for any instruction set. P is recomputed from the log-sum-exp; dQ of
// the tile is local, dK and dV are added to shared fp32 sums, one row tile after the other in their order, so
// that the result does not depend on the threads. For the files of one instruction set only.
#pragma once

#include "kernels/attention_forward.h"

namespace lm::attention {
namespace {

// The derivative of a soft cap, from what it gives: 1 - (score / cap)^2.
template <class Isa>
[[gnu::always_inline]] inline typename Isa::V cap_slope(const float* score, typename Isa::V inverse_cap) {
  const typename Isa::V x = Isa::load(score) * inverse_cap;
  return 1.0f - x * x;
}

// P and dS of a block of rows, from their scores and dP: as left operands of dQ (dS) and, pairs of rows
// together, of dV and dK. With a soft cap the scores are those that it gives, and dS is of what it is given.
template <class Isa, bool kMasked, bool kCapped>
[[gnu::noinline]] void probability_rows(const BackwardScratch& s, const RowBlock& block, float scale2,
                                        int64_t window, float cap) {
  using V = typename Isa::V;
  using Lane = typename Isa::Lane;
  const V factor = Isa::splat_float(scale2), inverse_cap = Isa::splat_float(kCapped ? 1 / cap : 0);
  for (int64_t m = 0; m < Isa::kRows; m += 2) {
    const int64_t row = block.begin + m;
    const V lse0 = Isa::splat_float(-s.lse[row]), lse1 = Isa::splat_float(-s.lse[row + 1]);
    const V delta0 = Isa::splat_float(s.delta[row]), delta1 = Isa::splat_float(s.delta[row + 1]);
    const int64_t end0 = s.position[row] + 1 - block.key0, end1 = s.position[row + 1] + 1 - block.key0;
    const int64_t begin0 = window > 0 ? end0 - window : 0, begin1 = window > 0 ? end1 - window : 0;
    const float *score = s.score + m * kKeys, *dp = s.dp + m * kKeys;
    Lane* ds = reinterpret_cast<Lane*>(s.ds) + m * kKeys / Isa::kStep;
    for (int64_t k = block.span.begin; k < block.span.end; k += Isa::kWidth) {
      V p0 = Isa::exp2(Isa::load(score + k) * factor + lse0);
      V p1 = Isa::exp2(Isa::load(score + kKeys + k) * factor + lse1);
      if constexpr (kMasked) {
        p0 = Isa::keep(p0, k, begin0, end0, 0);
        p1 = Isa::keep(p1, k, begin1, end1, 0);
      }
      V ds0 = p0 * (Isa::load(dp + k) - delta0), ds1 = p1 * (Isa::load(dp + kKeys + k) - delta1);
      if constexpr (kCapped) {
        ds0 = ds0 * cap_slope<Isa>(score + k, inverse_cap);
        ds1 = ds1 * cap_slope<Isa>(score + kKeys + k, inverse_cap);
      }
      Isa::store_keys(ds + k / Isa::kStep, ds0);
      Isa::store_keys(ds + (kKeys + k) / Isa::kStep, ds1);
      Isa::store_row_pair(reinterpret_cast<Lane*>(s.p_pairs) + row / Isa::kStep * kKeys + k, kKeys, p0, p1);
      Isa::store_row_pair(reinterpret_cast<Lane*>(s.ds_pairs) + row / Isa::kStep * kKeys + k, kKeys, ds0,
                          ds1);
    }
  }
}

// The same of a block whose scores are q·k.
template <class Isa, bool kMasked>
void probabilities(const AttentionBackward& a, const BackwardScratch& s, const RowBlock& block) {
  const float scale2 = rest_of_scale(a) * kLog2E;
  if (a.softcap > 0) {
    cap_scores<Isa>(s.score, block.span, a.scale, a.softcap);
    probability_rows<Isa, kMasked, true>(s, block, scale2, a.window, a.softcap);
  } else {
    probability_rows<Isa, kMasked, false>(s, block, scale2, a.window, 0);
  }
}

// The sums of dK and dV of a key tile, [keys, padded width]. Not `add`: the first tile of rows begins them.
struct KeySums {
  float *dk, *dv;
  bool add;
};

// Adds this tile's part of dK and dV to keys [key, key + M) of the key tile at `key0`.
template <class Isa, int M>
void add_keys(const AttentionBackward& a, const Tile& tile, const BackwardScratch& s, int64_t key0,
              int64_t key, const KeySums& sums) {
  using Lane = typename Isa::Lane;
  const int64_t group = a.heads / a.kv_heads, width = padded(a.head_dim);
  // Only rows that see one of these keys; rounded to pairs, whose other row then has P = 0 here or is
  // padding.
  const int64_t rows = tile.row_end - tile.row_begin;
  const int64_t first = larger(0, (key0 + key) * group - tile.row_begin) / 2 * 2;
  int64_t last = rows;
  if (a.window > 0) last = smaller(rows, (key0 + key + M - 1 + a.window) * group - tile.row_begin);
  const int64_t count = larger(0, (last + 1) / 2 * 2 - first) / Isa::kStep;
  const int64_t from = first / Isa::kStep;
  const auto *p = reinterpret_cast<const Lane*>(s.p_pairs), *ds = reinterpret_cast<const Lane*>(s.ds_pairs);
  multiply<Isa, M>({p + from * kKeys + key, 1, kKeys},
                   {reinterpret_cast<const Lane*>(s.dout_pairs) + from * width, width}, count,
                   {sums.dv + key * width, width, sums.add}, width);
  multiply<Isa, M>({ds + from * kKeys + key, 1, kKeys},
                   {reinterpret_cast<const Lane*>(s.q_pairs) + from * width, width}, count,
                   {sums.dk + key * width, width, sums.add}, width);
}

// dK and dV of one key tile, when it is this tile's turn; the last one to add rounds and stores them.
template <class Isa>
void add_key_tile(const AttentionBackward& a, const Tile& tile, const BackwardScratch& s,
                  const BackwardShared& shared, int64_t key0) {
  using Element = typename Isa::Element;
  const int64_t dim = a.head_dim, width = padded(dim), group = a.heads / a.kv_heads;
  const int64_t keys = smaller(kKeys, tile.document_length - key0), token = tile.document_begin + key0;
  const int64_t index = tile.row_begin / kBackwardRows, first = key0 * group / kBackwardRows;
  int64_t last = (tile.document_length * group - 1) / kBackwardRows;
  if (a.window > 0) last = smaller(last, ((key0 + keys - 1 + a.window) * group - 1) / kBackwardRows);

  int32_t* turn = shared.turn + tile.kv_head * a.tokens + token;
  const int64_t at = (tile.kv_head * a.tokens + token) * width;
  const KeySums sums{.dk = shared.dk + at, .dv = shared.dv + at, .add = index > first};
  wait_turn(turn, static_cast<int32_t>(index - first));
  if constexpr (Isa::kTiles) {
    Isa::add_keys(s, tile.row_end - tile.row_begin, width, keys, sums);
  } else {
    int64_t key = 0;
    for (; key + kKeyBlock <= keys; key += kKeyBlock) add_keys<Isa, kKeyBlock>(a, tile, s, key0, key, sums);
    for (; key < keys; ++key) add_keys<Isa, 1>(a, tile, s, key0, key, sums);
  }
  if (index == last) {
    for (int64_t key = 0; key < keys; ++key) {
      const int64_t to = (token + key) * a.dkv_stride + tile.kv_head * dim;
      Isa::store_row(static_cast<Element*>(a.dk) + to, sums.dk + key * width, a.scale, dim);
      Isa::store_row(static_cast<Element*>(a.dv) + to, sums.dv + key * width, 1, dim);
    }
  }
  __atomic_store_n(turn, static_cast<int32_t>(index - first + 1), __ATOMIC_RELEASE);
}

// The tile's rows: q and dout as left and right operands, the log-sum-exp, and D = sum of dout * out.
template <class Isa>
int64_t load_rows(const AttentionBackward& a, const Tile& tile, const BackwardScratch& s) {
  using Lane = typename Isa::Lane;
  using Element = typename Isa::Element;
  const int64_t dim = a.head_dim, width = padded(dim), rows = tile.row_end - tile.row_begin;
  const int64_t group = a.heads / a.kv_heads;
  const int64_t all = list_rows<Isa>({a.q, a.q_stride, group, dim}, tile, s.position, s.row);
  Isa::pack_left(reinterpret_cast<Lane*>(s.q), s.row, rows, all, dim);
  Isa::pack_rows(reinterpret_cast<Lane*>(s.q_pairs), s.row, rows, all, dim, width);
  list_rows<Isa>({a.dout, a.heads * dim, group, dim}, tile, nullptr, s.row);
  Isa::pack_left(reinterpret_cast<Lane*>(s.dout), s.row, rows, all, dim);
  Isa::pack_rows(reinterpret_cast<Lane*>(s.dout_pairs), s.row, rows, all, dim, width);
  for (int64_t r = 0; r < all; ++r) {
    const int64_t token = tile.document_begin + s.position[r];
    const int64_t head = tile.kv_head * group + (tile.row_begin + r) % group;
    const auto* out = static_cast<const Element*>(a.out) + (token * a.heads + head) * dim;
    // Padding has q = dout = 0: P = 1, dP = D = 0, and nothing is added.
    s.lse[r] = r < rows ? a.lse[head * a.tokens + token] * kLog2E : 0.0f;
    s.delta[r] = r < rows ? Isa::inner_product(static_cast<const Element*>(s.row[r]), out, dim) : 0.0f;
  }
  for (int64_t i = 0; i < all * width; i += Isa::kWidth) Isa::store(s.dq + i, Isa::zero());
  return all;
}

template <class Isa>
void backward_tile(const AttentionBackward& a, const Tile& tile, const BackwardScratch& s,
                   const BackwardShared& shared) {
  using Lane = typename Isa::Lane;
  using Element = typename Isa::Element;
  const int64_t dim = a.head_dim, width = padded(dim), lanes = dim / Isa::kStep;
  auto *q = reinterpret_cast<Lane*>(s.q), *dout = reinterpret_cast<Lane*>(s.dout),
       *ds = reinterpret_cast<Lane*>(s.ds);
  auto *key_t = reinterpret_cast<Lane*>(s.key_t), *value_t = reinterpret_cast<Lane*>(s.value_t);
  auto* key = reinterpret_cast<Lane*>(s.key);

  const int64_t all = load_rows<Isa>(a, tile, s);
  const int64_t first_key = a.window > 0 ? larger(0, s.position[0] - a.window + 1) / kKeys * kKeys : 0;
  for (int64_t key0 = first_key; key0 <= s.position[all - 1]; key0 += kKeys) {
    const int64_t keys = smaller(kKeys, tile.document_length - key0);
    const int64_t at = (tile.document_begin + key0) * a.kv_stride + tile.kv_head * dim;
    Isa::pack_transposed(key_t, static_cast<const Element*>(a.k) + at, a.kv_stride, keys, dim);
    Isa::pack_transposed(value_t, static_cast<const Element*>(a.v) + at, a.kv_stride, keys, dim);
    Isa::pack_keys(key, static_cast<const Element*>(a.k) + at, a.kv_stride, keys, dim, width);
    for (int64_t r = 0; r < all; r += Isa::kRows) {
      const RowBlock block = row_block<Isa>(s.position, r, key0, a.window);
      const int64_t begin = block.span.begin, count = block.span.end - begin;
      if constexpr (Isa::kTiles) {
        if (count <= 0) Isa::turn_rows(s, r, 0, 0);
      }
      if (count <= 0) continue;
      multiply_rows<Isa>({q + r * lanes, lanes, 1}, {key_t + begin, kKeys}, lanes,
                         {s.score + begin, kKeys, false}, count);
      multiply_rows<Isa>({dout + r * lanes, lanes, 1}, {value_t + begin, kKeys}, lanes,
                         {s.dp + begin, kKeys, false}, count);
      if (block.partly_masked)
        probabilities<Isa, true>(a, s, block);
      else
        probabilities<Isa, false>(a, s, block);
      if constexpr (Isa::kTiles) Isa::turn_rows(s, r, begin, block.span.end);
      multiply_rows<Isa>({ds + begin / Isa::kStep, kKeys / Isa::kStep, 1},
                         {key + begin / Isa::kStep * width, width}, count / Isa::kStep,
                         {s.dq + r * width, width, true}, width);
    }
    add_key_tile<Isa>(a, tile, s, shared, key0);
  }
  list_rows<Isa>({a.dq, a.dq_stride, a.heads / a.kv_heads, dim}, tile, nullptr, s.row);
  for (int64_t r = 0; r < tile.row_end - tile.row_begin; ++r) {
    Isa::store_row(static_cast<Element*>(const_cast<void*>(s.row[r])), s.dq + r * width, a.scale, dim);
  }
}

}  // namespace
}  // namespace lm::attention
