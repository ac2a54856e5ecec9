// A row times a matrix on the CPU: some rows of the matrix at a time, so that x is loaded once for them.
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

constexpr int kAtOnce = 4;

// Of kAtOnce rows from `weight` on.
template <class T>
LM_INLINE void dot_products(const T* x, const T* weight, int64_t stride, int64_t columns, float* out) {
  F32 sum[kAtOnce];
  for (F32& s : sum) s = F32(0);
  each_vector(columns, [&](int64_t j, auto count) LM_BODY {
    const F32 of_x = load(x + j, count);
    for (int r = 0; r < kAtOnce; ++r)
      sum[r] = multiply_add(load(weight + r * stride + j, count), of_x, sum[r]);
  });
  for (int r = 0; r < kAtOnce; ++r) out[r] = sum_lanes(sum[r]);
}

template <class T>
LM_INLINE float dot_product(const T* x, const T* weight, int64_t columns) {
  F32 sum(0);
  each_vector(columns, [&](int64_t j, auto count)
                           LM_BODY { sum = multiply_add(load(weight + j, count), load(x + j, count), sum); });
  return sum_lanes(sum);
}

template <class T>
LM_INLINE void write(const MultiplyRow& a, int64_t row, const float* products, int n) {
  float lane[kLanes] = {};
  memcpy(lane, products, sizeof(float) * static_cast<size_t>(n));
  F32 value = load(lane, Whole{}) * F32(a.scale);
  if (a.addend != nullptr) value = value + load(static_cast<const T*>(a.addend) + row, Part{n});
  store(static_cast<T*>(a.out) + row, value, Part{n});
}

}  // namespace

void multiply_row(const MultiplyRow& a, StreamView stream) {
  with_dtype("multiply_row", a.dtype, [&](auto t) {
    using T = decltype(t);
    const T *x = static_cast<const T*>(a.x), *weight = static_cast<const T*>(a.weight);
    parallel_for(stream.threads, a.rows, row_grain(a.columns), [&](int64_t begin, int64_t end) {
      float products[kAtOnce];
      int64_t row = begin;
      for (; row + kAtOnce <= end; row += kAtOnce) {
        dot_products(x, weight + row * a.stride, a.stride, a.columns, products);
        write<T>(a, row, products, kAtOnce);
      }
      for (; row < end; ++row) {
        products[0] = dot_product(x, weight + row * a.stride, a.columns);
        write<T>(a, row, products, 1);
      }
    });
  });
}

}  // namespace lm::LM_ISA
