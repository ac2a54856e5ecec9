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

// c[m, 0..N vectors) = (add ? c : 0) + sum over k < count of left(m, k) * right[k, ...]; strides in lanes.
template <class Isa, int M, int N>
[[gnu::noinline]] void block(Left<Isa> left, const typename Isa::Lane* right, int64_t right_stride,
                             int64_t count, float* c, int64_t c_stride, bool add) {
  typename Isa::V sum[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sum[m][n] = add ? Isa::load(c + m * c_stride + n * Isa::kWidth) : Isa::zero();
  }
  for (int64_t k = 0; k < count; ++k) {
    typename Isa::L b[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) b[n] = Isa::load_lanes(right + n * Isa::kWidth);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const typename Isa::L a = Isa::splat(left.data + m * left.row);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sum[m][n] = Isa::multiply_add(a, b[n], sum[m][n]);
    }
    left.data += left.step;
    right += right_stride;
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) Isa::store(c + m * c_stride + n * Isa::kWidth, sum[m][n]);
  }
}

// The same for any width (a multiple of the vector's), cut into blocks that fit the registers.
template <class Isa, int M>
void multiply(Left<Isa> left, const typename Isa::Lane* right, int64_t right_stride, int64_t count, float* c,
              int64_t c_stride, int64_t width, bool add) {
  for (int64_t vectors = width / Isa::kWidth; vectors > 0;) {
    int64_t n = smaller(vectors, Isa::kVectors);
    if (vectors == Isa::kVectors + 1 && Isa::kVectors > 2) n = Isa::kVectors - 1;  // 3 + 2 rather than 4 + 1
    if constexpr (Isa::kVectors > 2) {
      if (n == 4) block<Isa, M, 4>(left, right, right_stride, count, c, c_stride, add);
      if (n == 3) block<Isa, M, 3>(left, right, right_stride, count, c, c_stride, add);
    }
    if (n == 2) block<Isa, M, 2>(left, right, right_stride, count, c, c_stride, add);
    if (n == 1) block<Isa, M, 1>(left, right, right_stride, count, c, c_stride, add);
    right += n * Isa::kWidth;
    c += n * Isa::kWidth;
    vectors -= n;
  }
}

// c = (add ? c : 0) + left * right for the rows of a block, on tiles if the path has them.
template <class Isa>
void multiply_rows(Left<Isa> left, const typename Isa::Lane* right, int64_t right_stride, int64_t count,
                   float* c, int64_t c_stride, int64_t width, bool add) {
  if constexpr (Isa::kTiles)
    Isa::multiply_tiles(left.data, left.row, right, right_stride, count, c, c_stride, width, add);
  else
    multiply<Isa, Isa::kRows>(left, right, right_stride, count, c, c_stride, width, add);
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
