// Attention on machines that multiply tiles of 16 x 32 bf16 values: products at several times the rate of
// AVX-512's, which leaves the time to the exponentials. Packed operands are AVX-512's: a tile's 64-byte rows
// are 16 of their lanes.
//
// Tile registers, by number: 0 to 3 sums of 32 x 32, 4 and 5 left rows, 6 and 7 right columns. They belong to
// this file between configure() and its end; a library that uses them too does so in its own calls.
#include "kernels/attention_avx512_bf16.h"

namespace lm::attention {
namespace {

constexpr int64_t kSide = 16;  // rows of a tile, and lanes of its rows

struct AmxBf16 : Avx512Bf16 {
  static constexpr bool kTiles = true;
  static constexpr int64_t kRows = kMostRows;               // two tiles
  static constexpr int64_t kKeyGrain = 32;                  // the lanes of a tile's row hold pairs of keys
  static constexpr int64_t kTurnedRow = kBackwardRows / 2;  // lanes of a row of turned()

  // kRows rows of `left`, whose lanes lie side by side. `count` and `width` are whole tiles.
  static void multiply_tiles(Left<AmxBf16> left, Right<AmxBf16> right, int64_t count, Sums c, int64_t width) {
    const int64_t left_bytes = left.row * 4, right_bytes = right.row * 4, c_bytes = c.row * 4;
    for (int64_t n = 0; n < width; n += 2 * kSide) {
      float *above = c.data + n, *below = c.data + kSide * c.row + n;
      if (c.add) {
        _tile_loadd(0, above, c_bytes);
        _tile_loadd(1, above + kSide, c_bytes);
        _tile_loadd(2, below, c_bytes);
        _tile_loadd(3, below + kSide, c_bytes);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t k = 0; k < count; k += kSide) {
        const Lane* const columns = right.data + k * right.row + n;
        _tile_loadd(4, left.data + k, left_bytes);
        _tile_loadd(6, columns, right_bytes);
        _tile_loadd(7, columns + kSide, right_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, left.data + kSide * left.row + k, left_bytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, above, c_bytes);
      _tile_stored(1, above + kSide, c_bytes);
      _tile_stored(2, below, c_bytes);
      _tile_stored(3, below + kSide, c_bytes);
    }
  }

  // P and dS of the rows [row, row + kRows) as left operands of dV and dK: a row per key. Keys outside of
  // [begin, end), for which these rows have none, get zeros.
  static void turn_rows(const BackwardScratch& s, int64_t row, int64_t begin, int64_t end) {
    for (std::byte* const pairs : {s.p_pairs, s.ds_pairs}) {
      const Lane* const from = reinterpret_cast<const Lane*>(pairs) + row / 2 * kKeys;
      Lane* const to = turned(pairs) + row / 2;
      for (int64_t key = 0; key < kKeys; key += kSide) {
        __m512i x[kSide] = {};
        if (key >= begin && key < end) {
#pragma GCC unroll 16
          for (int i = 0; i < kSide; ++i) x[i] = _mm512_loadu_si512(from + i * kKeys + key);
          transpose(x);
        }
#pragma GCC unroll 16
        for (int i = 0; i < kSide; ++i) _mm512_storeu_si512(to + (key + i) * kTurnedRow, x[i]);
      }
    }
  }

  // Adds the tile's `rows` to dK and dV of a key tile's first `keys`.
  static void add_keys(const BackwardScratch& s, int64_t rows, int64_t width, int64_t keys,
                       const KeySums& sums) {
    const int64_t count = (rows + kRows - 1) / kRows * kRows / 2;
    add_products(s, turned(s.p_pairs), {of_pairs(s.dout_pairs), width}, count, {sums.dv, width, sums.add},
                 keys);
    add_products(s, turned(s.ds_pairs), {of_pairs(s.q_pairs), width}, count, {sums.dk, width, sums.add},
                 keys);
  }

 private:
  // Behind the pairs, which are half of what fp32 lanes would take.
  static Lane* turned(std::byte* pairs) {
    return reinterpret_cast<Lane*>(pairs) + kTurnedRow * kKeys;
  }
  static const Lane* of_pairs(const std::byte* pairs) {
    return reinterpret_cast<const Lane*>(pairs);
  }

  // `left`: rows of turned(). All rows of `right` and `sums` are as wide as they are far apart.
  static void add_products(const BackwardScratch& s, const Lane* left, Right<AmxBf16> right, int64_t count,
                           Sums sums, int64_t keys) {
    const int64_t width = right.row;
    for (int64_t key = 0; key < keys; key += kRows) {
      const Left<AmxBf16> rows_of_keys{left + key * kTurnedRow, kTurnedRow, 1};
      float* const to = sums.data + key * width;
      if (key + kRows <= keys) {
        multiply_tiles(rows_of_keys, right, count, {to, width, sums.add}, width);
        continue;
      }
      // What follows the document's last key belongs to others.
      for (int64_t n = 0; n < width; n += 2 * kSide) {
        multiply_tiles(rows_of_keys, {right.data + n, width}, count, {s.score, 2 * kSide, false}, 2 * kSide);
        for (int64_t m = 0; m < keys - key; ++m) {
          for (int64_t i = n; i < n + 2 * kSide; i += kSide) {
            const V part = load(s.score + m * 2 * kSide + i - n);
            store(to + m * width + i, sums.add ? load(to + m * width + i) + part : part);
          }
        }
      }
    }
  }
};

// All tiles full. A thread's registers are released at the end, so that nobody saves them for nothing.
class Tiles {
 public:
  Tiles() {
    alignas(64) struct {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } layout;
    for (int t = 0; t < 8; ++t) layout.row_bytes[t] = 4 * kSide, layout.rows[t] = kSide;
    _tile_loadconfig(&layout);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

bool of_whole_tiles(int64_t head_dim) {
  return head_dim % (2 * kSide) == 0;
}

void forward(const AttentionForward& a, const Tile& tile, const ForwardScratch& s) {
  if (!of_whole_tiles(a.head_dim)) return kAvx512Bf16.forward_bf16(a, tile, s);
  const Tiles tiles;
  forward_tile<AmxBf16>(a, tile, s);
}

void backward(const AttentionBackward& a, const Tile& tile, const BackwardScratch& s,
              const BackwardShared& shared) {
  if (!of_whole_tiles(a.head_dim)) return kAvx512Bf16.backward_bf16(a, tile, s, shared);
  const Tiles tiles;
  backward_tile<AmxBf16>(a, tile, s, shared);
}

}  // namespace

const Path kAmxBf16 = {.name = "amx_bf16",
                       .forward_f32 = nullptr,
                       .forward_bf16 = forward,
                       .forward_f16 = nullptr,
                       .backward_f32 = nullptr,
                       .backward_bf16 = backward,
                       .backward_f16 = nullptr};

}  // namespace lm::attention
