// The register-blocked product that all of attention uses, for the files of one instruction set. Everything
// is in an anonymous namespace and calls no inline function of the standard library: the linker must never
// use a copy compiled for newer instructions for all.
//
// Operands are arrays of 4-byte lanes: fp32 values, or pairs of bf16 values that are neighbours along the
// summed index. `Isa` defines which (kStep values per lane) and how to multiply and add.
#pragma once

#include <cstdint>

#include "kernels/attention_path.h"

namespace lm::attention {
namespace {

[[gnu::always_inline]] inline int64_t smaller(int64_t a, int64_t b) {
  return a < b ? a : b;
}
[[gnu::always_inline]] inline int64_t larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

// A left operand: element (m, k) is at data[m * row + k * step].
template <class Isa>
struct Left {
  const typename Isa::Lane* data;
  int64_t row, step;
};
// A right operand: row k begins at data + k * row.
template <class Isa>
struct Right {
  const typename Isa::Lane* data;
  int64_t row;
};
// A result: row m begins at data + m * row. `add`: its values are the sums' beginnings.
struct Sums {
  float* data;
  int64_t row;
  bool add;
};

// c[m, 0..N vectors) = (c.add ? c : 0) + sum over k < count of left(m, k) * right[k, ...].
template <class Isa, int M, int N>
[[gnu::noinline]] void block(Left<Isa> left, Right<Isa> right, int64_t count, Sums c) {
  typename Isa::V sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n)
      sum[m][n] = c.add ? Isa::load(c.data + m * c.row + n * Isa::kWidth) : Isa::zero();
  }
  for (int64_t k = 0; k < count; ++k) {
    typename Isa::L b[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) b[n] = Isa::load_lanes(right.data + n * Isa::kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const typename Isa::L a = Isa::splat(left.data + m * left.row);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] = Isa::multiply_add(a, b[n], sum[m][n]);
    }
    left.data += left.step;
    right.data += right.row;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) Isa::store(c.data + m * c.row + n * Isa::kWidth, sum[m][n]);
  }
}

// The same for any width (a multiple of the vector's), cut into blocks that fit the registers.
template <class Isa, int M>
void multiply(Left<Isa> left, Right<Isa> right, int64_t count, Sums c, int64_t width) {
  for (int64_t vectors = width / Isa::kWidth; vectors > 0;) {
    int64_t n = smaller(vectors, Isa::kVectors);
    if (vectors == Isa::kVectors + 1 && Isa::kVectors > 2) n = Isa::kVectors - 1;  // 3 + 2 rather than 4 + 1
    if constexpr (Isa::kVectors > 2) {
      if (n == 4) block<Isa, M, 4>(left, right, count, c);
      if (n == 3) block<Isa, M, 3>(left, right, count, c);
    }
    if (n == 2) block<Isa, M, 2>(left, right, count, c);
    if (n == 1) block<Isa, M, 1>(left, right, count, c);
    right.data += n * Isa::kWidth;
    c.data += n * Isa::kWidth;
    vectors -= n;
  }
}

// c = (c.add ? c : 0) + left * right for the rows of a block, on tiles if the path has them.
template <class Isa>
void multiply_rows(Left<Isa> left, Right<Isa> right, int64_t count, Sums c, int64_t width) {
  if constexpr (Isa::kTiles)
    Isa::multiply_tiles(left, right, count, c, width);
  else
    multiply<Isa, Isa::kRows>(left, right, count, c, width);
}

// Which keys of the tile that begins at `key0` rows at positions [first, last] see: whole grains, empty when
// begin >= end.
struct Span {
  int64_t begin, end;
};
inline Span visible_span(int64_t first, int64_t last, int64_t key0, int64_t window, int64_t grain) {
  Span span{0, smaller(kKeys, (last - key0 + grain) / grain * grain)};
  if (last < key0) span.end = 0;
  if (window > 0) span.begin = larger(0, first - window + 1 - key0) / grain * grain;
  return span;
}

}  // namespace
}  // namespace lm::attention
