// Attention's arithmetic in fp32 on vectors of kWidth floats, from fp32, bf16 or fp16 memory. Written with
// the compiler's vector types, so one text serves SSE2, AVX2 and AVX-512F. For the files of one instruction
// set only.
#pragma once

#include <cstring>

#include "base/host_device.h"
#include "kernels/attention_backward.h"

namespace lm::attention {
namespace {

struct BFloat16 {
  uint16_t bits;
};

[[gnu::always_inline]] inline float to_float(float x) {
  return x;
}
[[gnu::always_inline]] inline float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
[[gnu::always_inline]] inline void from_float(float& to, float x) {
  to = x;
}
// Rounds to nearest even; NaN stays NaN.
[[gnu::always_inline]] inline void from_float(BFloat16& to, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  to.bits = static_cast<uint16_t>(x == x ? rounded : 0x7FC0);
}

[[gnu::always_inline]] inline void from_float(Fp16& to, float x) {
  to = to_fp16(x);
}

template <int kWidth>
struct Vectors;
template <>
struct Vectors<4> {
  typedef float Float __attribute__((vector_size(16)));
  typedef int32_t Int __attribute__((vector_size(16)));
  typedef uint32_t Unsigned __attribute__((vector_size(16)));
};
template <>
struct Vectors<8> {
  typedef float Float __attribute__((vector_size(32)));
  typedef int32_t Int __attribute__((vector_size(32)));
  typedef uint32_t Unsigned __attribute__((vector_size(32)));
};
template <>
struct Vectors<16> {
  typedef float Float __attribute__((vector_size(64)));
  typedef int32_t Int __attribute__((vector_size(64)));
  typedef uint32_t Unsigned __attribute__((vector_size(64)));
};

template <int kWidthValue, class ElementType>
struct Portable {
  using Element = ElementType;
  using Lane = float;
  static constexpr int kWidth = kWidthValue, kStep = 1;
  static constexpr int kVectors = kWidth == 16 ? 4 : 2;  // 6 x 4 of 32 registers, 6 x 2 of 16
  static constexpr bool kTiles = false;                  // products are of vectors
  static constexpr int64_t kRows = kRowBlock;            // computed at once
  static constexpr int64_t kKeyGrain = 16;  // masked key tiles are computed in spans of this many keys
  using V = typename Vectors<kWidth>::Float;
  using I = typename Vectors<kWidth>::Int;
  using L = V;

  [[gnu::always_inline]] static V load(const float* from) {
    V x;
    std::memcpy(&x, from, sizeof(V));
    return x;
  }
  [[gnu::always_inline]] static L load_lanes(const float* from) { return load(from); }
  [[gnu::always_inline]] static void store(float* to, V x) { std::memcpy(to, &x, sizeof(V)); }
  [[gnu::always_inline]] static V zero() { return V{}; }
  [[gnu::always_inline]] static V splat_float(float x) { return x - V{}; }
  [[gnu::always_inline]] static L splat(const float* x) { return splat_float(*x); }
  [[gnu::always_inline]] static V multiply_add(L a, L b, V sum) { return sum + a * b; }
  [[gnu::always_inline]] static V larger(V a, V b) { return a > b ? a : b; }
  // x where begin <= k + lane < end, else `other`.
  [[gnu::always_inline]] static V keep(V x, int64_t k, int64_t begin, int64_t end, float other) {
    const I lane = lanes() + static_cast<int32_t>(k);
    return (lane >= static_cast<int32_t>(begin)) & (lane < static_cast<int32_t>(end)) ? x
                                                                                      : splat_float(other);
  }
  static float largest(V x) {
    float result = x[0];
    for (int i = 1; i < kWidth; ++i) result = x[i] > result ? x[i] : result;
    return result;
  }
  static float total(V x) {
    float result = 0;
    for (int i = 0; i < kWidth; ++i) result += x[i];
    return result;
  }
  static bool any_above(V x, float limit) { return largest(x) > limit; }

  // 2^f for |f| <= 1/2, relative error 1e-7: minimax of degree 5 with the constant fixed to 1.
  [[gnu::always_inline]] static V exp2_fraction(V f) {
    V y = f * 0x1.5c08e6p-10f + 0x1.3d0c52p-7f;
    y = y * f + 0x1.c6b6e4p-5f;
    y = y * f + 0x1.ebf918p-3f;
    y = y * f + 0x1.62e428p-1f;
    return y * f + 1.0f;
  }
  // 2^x to 1 ulp or so for x <= 126, exactly 1 at 0; results below the normal numbers become nearly 0.
  [[gnu::always_inline]] static V exp2(V x) {
    x = x < -126.0f ? splat_float(-126.0f) : x;
    const V shifted = x + 0x1.8p23f;  // the integer part, to nearest, in the low bits
    const V f = x - (shifted - 0x1.8p23f);
    V y = exp2_fraction(f);
    // Unsigned, as it wraps where x is too large: such lanes are masked later.
    typename Vectors<kWidth>::Unsigned bits, exponent;
    std::memcpy(&bits, &y, sizeof bits);
    std::memcpy(&exponent, &shifted, sizeof exponent);
    bits += exponent << 23;
    std::memcpy(&y, &bits, sizeof bits);
    return y;
  }
  // tanh, relative error 3e-7 also near 0, where 1 - 2 / (e^2x + 1) cancels: a minimax polynomial in x^2
  // there.
  [[gnu::always_inline]] static V tanh(V x) {
    const V square = x * x;
    V near = square * -0x1.75e1ccp-8f + 0x1.52269ap-6f;
    near = near * square - 0x1.b83c5ap-5f;
    near = near * square + 0x1.110726p-3f;
    near = near * square - 0x1.555532p-2f;
    near = near * square * x + x;
    V size = x < 0.0f ? -x : x;
    size = size > 10.0f ? splat_float(10.0f) : size;  // 1 from 9.02 on
    const V far = 1.0f - 2.0f / (exp2(size * 0x1.715476p+1f) + 1.0f);
    const V with_sign = x < 0.0f ? -far : far;
    return size < 0.625f ? near : with_sign;
  }

  [[gnu::always_inline]] static void store_keys(float* to, V x) { store(to, x); }
  [[gnu::always_inline]] static void store_row_pair(float* to, int64_t stride, V x0, V x1) {
    store(to, x0);
    store(to + stride, x1);
  }

  static float inner_product(const Element* a, const Element* b, int64_t count) {
    float sum[8] = {};
    for (int64_t i = 0; i < count; ++i) sum[i % 8] += to_float(a[i]) * to_float(b[i]);
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
  }
  static void store_row(Element* to, const float* from, float factor, int64_t count) {
    for (int64_t i = 0; i < count; ++i) from_float(to[i], from[i] * factor);
  }

  // Rows as they are: [all, dim], zeros past `rows`.
  static void pack_left(float* to, const void* const* row, int64_t rows, int64_t all, int64_t dim) {
    pack_rows(to, row, rows, all, dim, dim);
  }
  static void pack_rows(float* to, const void* const* row, int64_t rows, int64_t all, int64_t dim,
                        int64_t width) {
    for (int64_t r = 0; r < all; ++r) {
      const auto* from = static_cast<const Element*>(row[r]);
      const int64_t used = r < rows ? dim : 0;
      for (int64_t i = 0; i < used; ++i) to[r * width + i] = to_float(from[i]);
      for (int64_t i = used; i < width; ++i) to[r * width + i] = 0;
    }
  }
  // [kKeys, width], zeros past `keys`.
  static void pack_keys(float* to, const Element* from, int64_t stride, int64_t keys, int64_t dim,
                        int64_t width) {
    for (int64_t j = 0; j < kKeys; ++j) {
      const int64_t used = j < keys ? dim : 0;
      for (int64_t i = 0; i < used; ++i) to[j * width + i] = to_float(from[j * stride + i]);
      for (int64_t i = used; i < width; ++i) to[j * width + i] = 0;
    }
  }
  // [dim, kKeys], zeros past `keys`.
  static void pack_transposed(float* to, const Element* from, int64_t stride, int64_t keys, int64_t dim) {
    for (int64_t i = 0; i < dim; ++i) {
      for (int64_t j = 0; j < keys; ++j) to[i * kKeys + j] = to_float(from[j * stride + i]);
      for (int64_t j = keys; j < kKeys; ++j) to[i * kKeys + j] = 0;
    }
  }

 private:
  [[gnu::always_inline]] static I lanes() {
    I lane;
    for (int i = 0; i < kWidth; ++i) lane[i] = i;
    return lane;
  }
};

}  // namespace
}  // namespace lm::attention
