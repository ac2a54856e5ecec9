// Products of bf16 and fp16 matrices on the CPU, for processors on which LibTorch has only plain loops (for
// fp16 all): tiles of the result, one thread each, summed in fp32 from panels that are converted for a tile.
// An element's terms are added in the order of the summed index, so neither threads nor tiles nor padding
// change a bit.
#include "kernels/gemm_panels.h"

#include <type_traits>

#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

// Of sums in registers, beside one vector of the right matrix and one element of the left: 12 of 16
// registers. (With AVX-512 twice as many of 32: kMostVectors.)
constexpr int kRows = 12 / kParts;

LM_INLINE F32 splat(float x) {
  F32 r;
  for (auto& p : r.part) p = x - NativeF32{};  // x itself, -0 too
  return r;
}

// An operand as the sum runs over it: element (i, k) for the left matrix's row or the right one's column i
// is at data[i * stride + k], or where `apart` at data[k * stride + i].
template <class T>
struct Operand {
  const T* data;
  int64_t stride;
  bool apart;

  Operand(const View& matrix, bool is_apart)
      : data(static_cast<const T*>(matrix.data)), stride(matrix.stride), apart(is_apart) {}
  const T* at(int64_t i, int64_t k) const { return data + (apart ? k * stride + i : i * stride + k); }
};

// Where the left panel has element (row, k): the kRows rows of a group that the registers take at once lie
// side by side for each k, or row after row. So a group is read from its beginning to its end either way.
template <bool apart>
constexpr int kRowStep = apart ? 1 : kPanelDepth + kPanelGap;
template <bool apart>
constexpr int kDepthStep = apart ? kRows : 1;
template <bool apart>
constexpr int kGroupStep = (kPanelDepth * kRows) + (apart ? kLanes : kRows * kPanelGap);

// Asks for the lines of a panel's row that is converted soon: rows lie a stride apart, and the processor
// foresees no such step. Past the matrix it does nothing.
template <class T>
LM_INLINE void prefetch(const T* row, int elements) {
  constexpr int kLine = 32;
  for (int i = 0; i < elements; i += kLine) __builtin_prefetch(row + i);
}

template <class T>
void widen(const T* from, int64_t n, float* to) {
  each_vector(n, [&](int64_t j, auto count) LM_BODY { store(to + j, load(from + j, count), count); });
}

// Zeros stand for rows that fill up the registers.
template <bool apart, class T>
void pack_left(const Operand<T>& a, int64_t row, int64_t rows, int64_t k0, int64_t depth, float* to) {
  const int64_t filled = (rows + kRows - 1) / kRows * kRows;
  if constexpr (apart) {
    for (int64_t k = 0; k < depth; ++k) {
      const T* const from = a.at(row, k0 + k);
      prefetch(a.at(row, k0 + k + 8), kPanelRows);
      // A vector is wider than a group: what it has more is written again, by the next k.
      for (int64_t r = 0; r < filled; r += kRows) {
        float* const line = to + r / kRows * kGroupStep<apart> + k * kRows;
        const int64_t n = rows - r;
        store(line, n >= kLanes ? load(from + r, Whole{}) : load(from + r, Part{static_cast<int>(n)}),
              Whole{});
      }
    }
  } else {
    for (int64_t r = 0; r < rows; ++r) {
      prefetch(a.at(row + r + 2, k0), kPanelDepth);
      widen(a.at(row + r, k0), depth, to + r * kRowStep<apart>);
    }
    for (int64_t r = rows; r < filled; ++r) memset(to + r * kRowStep<apart>, 0, sizeof(float) * depth);
  }
}

typedef uint16_t Eight __attribute__((vector_size(16)));

// block[k][i] = from[i][k], eight by eight.
LM_INLINE void transpose(const Eight* from, uint16_t (*block)[kLanes]) {
  Eight pairs[8], fours[8];
  for (int i = 0; i < 4; ++i) {
    pairs[2 * i] = __builtin_shufflevector(from[i], from[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
    pairs[2 * i + 1] = __builtin_shufflevector(from[i], from[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
  }
  // pairs[2 i]: rows i and i + 4 of k 0 to 3; pairs[2 i + 1]: of k 4 to 7.
  for (int half = 0; half < 2; ++half) {
    for (int i = 0; i < 2; ++i) {
      const Eight low = pairs[2 * i + half], high = pairs[2 * i + 4 + half];
      fours[4 * half + 2 * i] = __builtin_shufflevector(low, high, 0, 8, 1, 9, 2, 10, 3, 11);
      fours[4 * half + 2 * i + 1] = __builtin_shufflevector(low, high, 4, 12, 5, 13, 6, 14, 7, 15);
    }
  }
  // fours[4 half + 2 i + q]: rows i, i + 2, i + 4, i + 6 of the two k from 4 half + 2 q on.
  for (int half = 0; half < 2; ++half) {
    for (int q = 0; q < 2; ++q) {
      const Eight even = fours[4 * half + q], odd = fours[4 * half + 2 + q];
      const Eight first = __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
      const Eight second = __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
      memcpy(block[4 * half + 2 * q], &first, sizeof first);
      memcpy(block[4 * half + 2 * q + 1], &second, sizeof second);
    }
  }
}

// Eight elements, or `n` and zeros.
LM_INLINE Eight load_eight(const void* from, int64_t n) {
  Eight r = {};
  if (n >= 8)
    memcpy(&r, from, sizeof r);
  else
    memcpy(&r, from, sizeof(uint16_t) * static_cast<size_t>(n));
  return r;
}

// Sixteen columns as [depth, 16], zeros past `columns`.
template <class T>
void pack_columns(const Operand<T>& b, int64_t column, int64_t columns, int64_t k0, int64_t depth,
                  float* to) {
  if (b.apart) {
    for (int64_t k = 0; k < depth; ++k) {
      const T* const from = b.at(column, k0 + k);
      prefetch(from + 2 * kLanes, 1);
      store(to + k * kLanes,
            columns >= kLanes ? load(from, Whole{}) : load(from, Part{static_cast<int>(columns)}), Whole{});
    }
    return;
  }
  for (int64_t k = 0; k < depth; k += 8) {
    for (int i = 0; i < 2; ++i) prefetch(b.at(column + kLanes + k / 8 * 2 % kLanes + i, k0), kPanelDepth);
    uint16_t block[8][kLanes];
    const int64_t n = depth - k < 8 ? depth - k : 8;
    for (int half = 0; half < 2; ++half) {
      Eight rows[8] = {};
      for (int i = 0; i < 8 && 8 * half + i < columns; ++i)
        rows[i] = load_eight(b.at(column + 8 * half + i, k0 + k), n);
      transpose(rows, reinterpret_cast<uint16_t(*)[kLanes]>(&block[0][8 * half]));
    }
    for (int64_t i = 0; i < n; ++i)
      store(to + (k + i) * kLanes, load(reinterpret_cast<const T*>(block[i]), Whole{}), Whole{});
  }
}

// kRows x 16 sums, or as many again beside them: of these terms, or with them. Where there are 32 registers
// one element of the left then serves two vectors of the right, whose panels lie one after the other.
constexpr int kMostVectors = kParts == 1 ? 2 : 1;
template <bool apart, int vectors>
LM_INLINE void multiply(const float* left, const float* right, int64_t depth, float* sums, bool adds) {
  F32 sum[kRows][vectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < vectors; ++v)
      sum[r][v] = adds ? load(sums + r * kTileColumns + v * kLanes, Whole{}) : F32(0);
  }
  for (int64_t k = 0; k < depth; ++k) {
    F32 columns[vectors];
    for (int v = 0; v < vectors; ++v)
      columns[v] = load(right + v * kLanes * kPanelDepth + k * kLanes, Whole{});
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const F32 one = splat(left[r * kRowStep<apart> + k * kDepthStep<apart>]);
      for (int v = 0; v < vectors; ++v) sum[r][v] = multiply_add(one, columns[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < vectors; ++v) store(sums + r * kTileColumns + v * kLanes, sum[r][v], Whole{});
  }
}

// A tile of the result.
struct Tile {
  int64_t row, rows, column, columns;
};

// The left panel, which is the tile's from row `top` on, times the right one.
template <bool apart>
void multiply_panels(GemmPanels& panels, int64_t top, int64_t rows, int64_t all_columns, int64_t depth,
                     bool adds) {
  int64_t j = 0;
  const auto columns_of = [&]<int vectors>(std::integral_constant<int, vectors>) LM_BODY {
    for (; j + (vectors - 1) * kLanes < all_columns; j += vectors * kLanes) {
      for (int64_t r = 0; r < rows; r += kRows)
        multiply<apart, vectors>(panels.left + r / kRows * kGroupStep<apart>, panels.right + j * kPanelDepth,
                                 depth, panels.sums + (top + r) * kTileColumns + j, adds);
    }
  };
  columns_of(std::integral_constant<int, kMostVectors>{});
  columns_of(std::integral_constant<int, 1>{});
}

template <bool apart, class T>
void add_up(const Operand<T>& a, const Operand<T>& b, const Tile& t, int64_t inner, GemmPanels& panels) {
  for (int64_t k0 = 0; k0 < inner || k0 == 0; k0 += kPanelDepth) {
    const int64_t depth = inner - k0 < kPanelDepth ? inner - k0 : kPanelDepth;
    for (int64_t j = 0; j < t.columns; j += kLanes)
      pack_columns(b, t.column + j, t.columns - j, k0, depth, panels.right + j * kPanelDepth);
    for (int64_t top = 0; top < t.rows; top += kPanelRows) {
      const int64_t rows = t.rows - top < kPanelRows ? t.rows - top : kPanelRows;
      pack_left<apart>(a, t.row + top, rows, k0, depth, panels.left);
      multiply_panels<apart>(panels, top, rows, t.columns, depth, k0 > 0);
    }
  }
}

template <class T>
void write(const Gemm& g, const Tile& t, const float* sums) {
  const auto element = [&](const View& matrix, int64_t r) {
    return static_cast<T*>(matrix.data) + (t.row + r) * matrix.stride + t.column;
  };
  for (int64_t r = 0; r < t.rows; ++r) {
    each_vector(t.columns, [&](int64_t j, auto count) LM_BODY {
      F32 value = load(sums + r * kTileColumns + j, Whole{}) * F32(g.scale);
      if (g.addend.defined()) value = value + load(element(g.addend, r) + j, count) * F32(g.addend_scale);
      store(element(g.out, r) + j, value, count);
    });
  }
}

template <class T>
void gemm_of(const Gemm& g, StreamView stream) {
  const Operand<T> a(g.a, g.transpose_a), b(g.b, !g.transpose_b);
  const int64_t inner = g.transpose_a ? g.a.rows : g.a.columns;
  const auto parts = [](int64_t whole, int64_t part) { return (whole + part - 1) / part; };
  // Smaller tiles where there would be too few for the threads.
  constexpr int64_t kTilesPerThread = 4, kLeastColumns = 3 * kLanes;
  const int64_t least = stream.threads > 1 ? kTilesPerThread * stream.threads : 1;
  int64_t height = kTileRows, width = kTileColumns;
  const auto count = [&] { return parts(g.out.rows, height) * parts(g.out.columns, width); };
  while (count() < least && width > kLeastColumns)
    height > kPanelRows&& width < kTileColumns ? height /= 2 : width /= 2;
  const int64_t down = parts(g.out.rows, height), tiles = count();
  if (tiles == 0) return;
  const int threads = tiles < stream.threads ? static_cast<int>(tiles) : stream.threads;
  GemmPanels* const all = gemm_panels(threads);
  const auto share = [&](int64_t thread) { return tiles * thread / threads; };
  for (int t = 0; t < threads; ++t) all[t].next = share(t);
    // Tiles are numbered down the columns of the result. Each thread begins with its share of them: of a
    // weight that was just decoded (encoded_cpu.cpp) it reads the rows that it has in its own cache. Then it
    // helps others.
#pragma omp parallel num_threads(threads)
  {
    const int mine = omp_get_thread_num();
    for (int k = 0; k < threads; ++k) {
      const int owner = (mine + k) % threads;
      for (;;) {
        int64_t i;
#pragma omp atomic capture
        i = all[owner].next++;
        if (i >= share(owner + 1)) break;
        Tile t{.row = i % down * height, .rows = height, .column = i / down * width, .columns = width};
        if (t.rows > g.out.rows - t.row) t.rows = g.out.rows - t.row;
        if (t.columns > g.out.columns - t.column) t.columns = g.out.columns - t.column;
        g.transpose_a ? add_up<true>(a, b, t, inner, all[mine]) : add_up<false>(a, b, t, inner, all[mine]);
        write<T>(g, t, all[mine].sums);
      }
    }
  }
}

}  // namespace

void gemm(const Gemm& g, StreamView stream) {
  if (g.a.dtype != g.out.dtype) refuse_dtype("gemm", g.out.dtype);
  if (g.a.dtype == DType::kBF16) return gemm_of<Bf16>(g, stream);
  if (g.a.dtype == DType::kF16) return gemm_of<Fp16>(g, stream);
  refuse_dtype("gemm", g.a.dtype);
}

}  // namespace lm::LM_ISA
