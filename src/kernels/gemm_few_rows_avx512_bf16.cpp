// Of a product "few" is the matrix of few rows, "large" the other factor, or the result where both have few.
// This file alone has these instructions (attention.cmake has the rule).
#include "kernels/gemm_few_rows.h"

#include <immintrin.h>
#include <omp.h>

#include <cstring>
#include <memory>

#include "base/bytes.h"

namespace lm {
namespace {

using Bits = uint16_t;  // of a bf16
using Pair = uint32_t;  // of neighbours in the summed index
constexpr int kLanes = 16, kColumns = 2 * kLanes;

template <class T>
T* row_of(const View& x, int64_t row) {
  return static_cast<T*>(x.data) + row * x.stride;
}
const Bits* at(const View& x, int64_t row) {
  return row_of<const Bits>(x, row);
}

__m512 widened(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}
__m512 multiply_add(__m512 sum, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
__m512i splat(const void* pair) {
  Pair x;
  std::memcpy(&x, pair, sizeof x);
  return _mm512_set1_epi32(static_cast<int>(x));
}

// Where a pair's elements come from: 0 ... 31 of the first row, 32 ... 63 of the second.
struct Order {
  alignas(64) Bits of[2][2 * kLanes];
};
constexpr Order kOrder = [] {
  Order out = {};
  for (int i = 0; i < 4 * kLanes; ++i) out.of[i / 32][i % 32] = static_cast<Bits>(i / 2 + i % 2 * 32);
  return out;
}();

// Pairs of a row's and the next one's elements, kColumns of them; `second` null: of zeros.
void interleave(const Bits* first, const Bits* second, Pair* to) {
  const __m512i low = _mm512_loadu_si512(first), high = second ? _mm512_loadu_si512(second) : __m512i{};
  for (int half = 0; half < 2; ++half) {
    const __m512i order = _mm512_load_si512(kOrder.of[half]);
    _mm512_storeu_si512(to + half * kLanes, _mm512_permutex2var_epi16(low, order, high));
  }
}

// kColumns sums become elements of a row of the result, from `column` on.
void store(const Gemm& g, int64_t row, int64_t column, __m512 low, __m512 high) {
  const __m512 scale = _mm512_set1_ps(g.scale), addend_scale = _mm512_set1_ps(g.addend_scale);
  low = _mm512_mul_ps(low, scale), high = _mm512_mul_ps(high, scale);
  if (g.addend.defined()) {
    const auto* const from = reinterpret_cast<const __m256i*>(at(g.addend, row) + column);
    low = _mm512_fmadd_ps(widened(_mm256_loadu_si256(from)), addend_scale, low);
    high = _mm512_fmadd_ps(widened(_mm256_loadu_si256(from + 1)), addend_scale, high);
  }
  const __m512bh both = _mm512_cvtne2ps_pbh(high, low);
  std::memcpy(row_of<Bits>(g.out, row) + column, &both, sizeof both);
}

// ---- out = few largeᵀ: sums over rows of both

// Of vectors * kLanes of the few rows with rows [n, n + kWeights) of the large matrix, of which those before
// `end` count. `packed`: [inner / 2][rows] pairs.
template <int vectors>
void multiply_large_rows(const Gemm& g, const Pair* packed, int64_t n, int64_t end) {
  constexpr int kWeights = 24 / vectors, kRows = vectors * kLanes;
  constexpr int kAhead = 32;  // elements of a line
  const Bits* large[kWeights];
  for (int i = 0; i < kWeights; ++i) large[i] = at(g.b, n + i < end ? n + i : end - 1);
  __m512 sum[kWeights][vectors] = {};
  for (int64_t k = 0; k < g.a.columns; k += 2, packed += kRows) {
    // Of the rows that come next: they lie far apart, and the processor foresees none.
    if (k % kAhead == 0)
      for (int i = 0; i < kWeights; ++i) __builtin_prefetch(large[i] + kWeights * g.b.stride + k);
    __m512i few[vectors];
    for (int v = 0; v < vectors; ++v) few[v] = _mm512_loadu_si512(packed + v * kLanes);
#pragma GCC unroll 24
    for (int i = 0; i < kWeights; ++i) {
      const __m512i weight = splat(large[i] + k);
      for (int v = 0; v < vectors; ++v) sum[i][v] = multiply_add(sum[i][v], few[v], weight);
    }
  }
  for (int i = 0; i < kWeights && n + i < end; ++i) {
    for (int v = 0; v < vectors; ++v) {
      const int64_t first = v * kLanes, rows = g.out.rows - first;
      alignas(64) float values[kLanes];
      for (int l = 0; g.addend.defined() && l < kLanes && l < rows; ++l)
        values[l] = to_float(Bf16{at(g.addend, first + l)[n + i]});
      __m512 value = _mm512_mul_ps(sum[i][v], _mm512_set1_ps(g.scale));
      if (g.addend.defined())
        value = _mm512_fmadd_ps(_mm512_load_ps(values), _mm512_set1_ps(g.addend_scale), value);
      const __m256bh rounded = _mm512_cvtneps_pbh(value);
      Bits bits[kLanes];
      std::memcpy(bits, &rounded, sizeof bits);
      for (int l = 0; l < kLanes && l < rows; ++l) row_of<Bits>(g.out, first + l)[n + i] = bits[l];
    }
  }
}

template <int vectors>
void by_large_rows(const Gemm& g, int threads) {
  constexpr int64_t kRows = vectors * kLanes, kWeights = 24 / vectors;
  const int64_t pairs = g.a.columns / 2, blocks = ceil_div(g.out.columns, kWeights);
  const auto packed = std::make_unique_for_overwrite<Pair[]>(static_cast<size_t>(pairs * kRows));
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t k = 0; k < pairs; ++k) {
      for (int64_t r = 0; r < kRows; ++r) {
        packed[k * kRows + r] = 0;
        if (r < g.a.rows) std::memcpy(&packed[k * kRows + r], at(g.a, r) + 2 * k, sizeof(Pair));
      }
    }
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; ++b)
      multiply_large_rows<vectors>(g, packed.get(), b * kWeights, g.out.columns);
  }
}

// ---- Sums over pairs of rows that are interleaved: kOutputs rows of the result by kColumns columns

constexpr int kOutputs = 8;

struct Sums {
  __m512 of[kOutputs][2];
};

// `factors`: of each row of the result its pairs, one behind another. `packed`: [pairs][kColumns], a row of
// it `stride` pairs behind the one before.
struct Interleaved {
  const void* factors[kOutputs];
  const Pair* packed;
  int64_t stride, pairs;
};
// += their products.
__attribute__((always_inline)) inline void add_up(const Interleaved& of, Sums& to) {
  Sums sum = to;
  for (int64_t p = 0; p < of.pairs; ++p) {
    const __m512i low = _mm512_loadu_si512(of.packed + p * of.stride),
                  high = _mm512_loadu_si512(of.packed + p * of.stride + kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < kOutputs; ++i) {
      const __m512i factor = splat(static_cast<const Pair*>(of.factors[i]) + p);
      sum.of[i][0] = multiply_add(sum.of[i][0], low, factor);
      sum.of[i][1] = multiply_add(sum.of[i][1], high, factor);
    }
  }
  to = sum;
}

// out = few large. The large matrix is read some rows at a time, from their beginning to their end: their
// columns lie a power of two apart, of which a cache holds few. Sums stay in memory meanwhile.
constexpr int64_t kDepth = 32;  // pairs of rows at a time

// Columns [first, first + kColumns * strips). `sums`: [strips][blocks of kOutputs rows].
void multiply_columns(const Gemm& g, int64_t first, int64_t strips, Sums* sums) {
  const int64_t pairs = g.b.rows / 2, blocks = ceil_div(g.out.rows, kOutputs);
  alignas(64) Pair packed[kDepth * kColumns];
  for (int64_t p0 = 0; p0 < pairs; p0 += kDepth) {
    const int64_t depth = pairs - p0 < kDepth ? pairs - p0 : kDepth;
    for (int64_t s = 0; s < strips; ++s) {
      const int64_t column = first + s * kColumns;
      for (int64_t p = 0; p < depth; ++p) {
        const int64_t row = 2 * (p0 + p);
        for (int64_t next = row + 2 * kDepth; next < row + 2 * kDepth + 2 && next < g.b.rows; ++next)
          __builtin_prefetch(at(g.b, next) + column, 0, 2);
        interleave(at(g.b, row) + column, at(g.b, row + 1) + column, packed + p * kColumns);
      }
      for (int64_t b = 0; b < blocks; ++b) {
        Interleaved of{.factors = {}, .packed = packed, .stride = kColumns, .pairs = depth};
        for (int i = 0; i < kOutputs; ++i) {
          const int64_t r = b * kOutputs + i;
          of.factors[i] = at(g.a, r < g.out.rows ? r : g.out.rows - 1) + 2 * p0;
        }
        Sums& kept = sums[s * blocks + b];
        Sums sum = {};
        if (p0 > 0) sum = kept;
        add_up(of, sum);
        if (p0 + depth < pairs) {
          kept = sum;
          continue;
        }
        for (int i = 0; i < kOutputs && b * kOutputs + i < g.out.rows; ++i)
          store(g, b * kOutputs + i, column, sum.of[i][0], sum.of[i][1]);
      }
    }
  }
}
void by_large_columns(const Gemm& g, int threads) {
  const int64_t strips = g.b.columns / kColumns, blocks = ceil_div(g.out.rows, kOutputs);
  const auto sums = std::make_unique_for_overwrite<Sums[]>(static_cast<size_t>(strips * blocks));
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int t = 0; t < threads; ++t) {
    const int64_t begin = strips * t / threads, end = strips * (t + 1) / threads;
    if (begin < end) multiply_columns(g, begin * kColumns, end - begin, sums.get() + begin * blocks);
  }
}

// Pairs of a column of `from`, which has few rows; a zero where they are odd.
void pack_column(const View& from, int64_t column, Pair* to) {
  for (int64_t r = 0; r < from.rows; r += 2) {
    const Bits pair[2] = {at(from, r)[column], r + 1 < from.rows ? at(from, r + 1)[column] : Bits{0}};
    std::memcpy(to + r / 2, pair, sizeof pair);
  }
}

// out = leftᵀ right, of few rows each: what is large is the result.
void by_result(const Gemm& g, int threads) {
  constexpr int64_t kMostPairs = kFewRows / 2;
  const int64_t rows = g.a.rows, pairs = ceil_div(rows, 2), large = g.out.rows, columns = g.out.columns;
  const auto right = std::make_unique_for_overwrite<Pair[]>(static_cast<size_t>(pairs * columns));
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (int64_t c = 0; c < columns; c += kColumns) {
      for (int64_t p = 0; p < pairs; ++p)
        interleave(at(g.b, 2 * p) + c, 2 * p + 1 < rows ? at(g.b, 2 * p + 1) + c : nullptr,
                   &right[p * columns + c]);
    }
#pragma omp for schedule(static)
    for (int64_t n = 0; n < large; n += kOutputs) {
      Pair left[kOutputs][kMostPairs];
      for (int i = 0; i < kOutputs; ++i) pack_column(g.a, n + i < large ? n + i : large - 1, left[i]);
      for (int64_t c = 0; c < columns; c += kColumns) {
        Interleaved of{.factors = {}, .packed = &right[c], .stride = columns, .pairs = pairs};
        for (int i = 0; i < kOutputs; ++i) of.factors[i] = left[i];
        Sums sum = {};
        add_up(of, sum);
        for (int i = 0; i < kOutputs && n + i < large; ++i) store(g, n + i, c, sum.of[i][0], sum.of[i][1]);
      }
    }
  }
}

}  // namespace

void gemm_few_rows(const Gemm& g, int threads) {
  if (g.transpose_a) return by_result(g, threads);
  if (!g.transpose_b) return by_large_columns(g, threads);
  switch (ceil_div(g.a.rows, kLanes)) {
    case 1:
      return by_large_rows<1>(g, threads);
    case 2:
      return by_large_rows<2>(g, threads);
    case 3:
      return by_large_rows<3>(g, threads);
    default:
      return by_large_rows<4>(g, threads);
  }
}

}  // namespace lm
