// A stand-in for <mma.h>: products of 16 x 16 x 16 with sums in fp32, as far as our kernels use them. Of such
// a product a lane has eight neighbours of one row, whatever a GPU does; of the factors it loads what these
// need. Addresses, and who calls, are looked at: a call that the 32 lanes of a warp do not make together, and
// an address or stride that the instructions do not take, end the grid.
#pragma once

#include <string>

#include "cuda_runtime.h"

namespace emulator::simt {
[[noreturn]] void stop(const std::string& what);
}

struct __half {
  uint16_t bits;
};
struct __nv_bfloat16 {
  uint16_t bits;
};

namespace nvcuda::wmma {

struct row_major {};
struct col_major {};
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
enum layout_t { mem_row_major, mem_col_major };

namespace detail {
inline float number(__nv_bfloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float out;
  memcpy(&out, &bits, sizeof out);
  return out;
}
inline float number(__half x) {
  _Float16 out;
  memcpy(&out, &x, sizeof out);
  return static_cast<float>(out);
}
inline int row() {
  return static_cast<int>(threadIdx.x) % 32 / 2;
}
inline int column() {
  return static_cast<int>(threadIdx.x) % 2 * 8;
}
inline void check(const void* p, size_t stride_bytes) {
  if (reinterpret_cast<uintptr_t>(p) % 32 != 0)
    emulator::simt::stop("a matrix of a warp at an address that is no multiple of 32 bytes");
  if (stride_bytes % 16 != 0)
    emulator::simt::stop("a matrix of a warp with a stride that is no multiple of 16 bytes");
}
}  // namespace detail

template <class Use, int m, int n, int k, class T, class Layout = void>
struct fragment {
  static_assert(m == 16 && n == 16 && k == 16);
  static constexpr int kLines = std::is_same_v<Use, matrix_a> ? 1 : 8;
  float at[kLines][16];  // of each row of A, or column of B
};
template <>
struct fragment<accumulator, 16, 16, 16, float, void> {
  float at[8];
};
using Sums = fragment<accumulator, 16, 16, 16, float>;

inline void fill_fragment(Sums& sums, float value) {
  for (float& x : sums.at) x = value;
}

template <class Use, class T, class Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& to, const T* from, unsigned stride) {
  detail::check(from, stride * sizeof(T));
  __syncwarp();
  constexpr bool a = std::is_same_v<Use, matrix_a>, rows = std::is_same_v<Layout, row_major>;
  for (int line = 0; line < to.kLines; ++line) {
    const unsigned at = a ? detail::row() : detail::column() + line;
    for (unsigned d = 0; d < 16; ++d)
      to.at[line][d] = detail::number(from[a == rows ? at * stride + d : d * stride + at]);
  }
}

template <class T, class LayoutA, class LayoutB>
EMULATOR_UNSEEN void mma_sync(Sums& out, const fragment<matrix_a, 16, 16, 16, T, LayoutA>& a,
                              const fragment<matrix_b, 16, 16, 16, T, LayoutB>& b, const Sums& c) {
  __syncwarp();
  for (int j = 0; j < 8; ++j) {
    float sum = c.at[j];
    for (int d = 0; d < 16; ++d) sum += a.at[0][d] * b.at[j][d];
    out.at[j] = sum;
  }
}

inline void store_matrix_sync(float* to, const Sums& from, unsigned stride, layout_t layout) {
  detail::check(to, stride * sizeof(float));
  __syncwarp();
  for (int j = 0; j < 8; ++j) {
    const unsigned r = detail::row(), c = detail::column() + j;
    to[layout == mem_row_major ? r * stride + c : c * stride + r] = from.at[j];
  }
}

}  // namespace nvcuda::wmma
