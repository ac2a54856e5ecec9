// DoRA's kernels on the CPU.
#include "kernels/cpu_launchers.h"
#include "kernels/norms_formula.h"

namespace lm::LM_ISA {
namespace {

// Squares of fp32 numbers are exact in fp64: only the order of the additions matters.
template <class T>
double sum_of_squares(const T* x, int64_t n) {
  double lane[kNormLanes] = {};
  const int64_t whole = n / kNormLanes * kNormLanes;
  for (int64_t j = 0; j < whole; j += kNormLanes) {
    for (int l = 0; l < kNormLanes; ++l) {
      const double v = to_float(x[j + l]);
      lane[l] += v * v;
    }
  }
  for (int64_t j = whole; j < n; ++j) {
    const double v = to_float(x[j]);
    lane[j - whole] += v * v;
  }
  return add_norm_lanes(lane);
}

template <class Weight, class Factor>
void norms_of_rows(const AdaptedNorms& a, int64_t begin, int64_t end) {
  const auto* const magnitude = static_cast<const Factor*>(a.magnitude);
  for (int64_t i = begin; i < end; ++i) {
    const auto* const b = static_cast<const Factor*>(a.b.data) + i * a.b.stride;
    const auto* const h = static_cast<const Factor*>(a.h.data) + i * a.h.stride;
    double cross = 0;
    for (int64_t k = 0; k < a.b.columns; ++k)
      cross += static_cast<double>(to_float(b[k])) * static_cast<double>(to_float(h[k]));
    const double squares =
        sum_of_squares(static_cast<const Weight*>(a.weight.data) + i * a.weight.stride, a.weight.columns);
    const double sum = squares + static_cast<double>(a.scale) * cross;
    a.norms[i] = static_cast<float>(__builtin_sqrt(sum < 0 ? 0 : sum));
    a.factors[i] = to_float(magnitude[i]) / a.norms[i];
  }
}

template <class T>
void scale_rows(const ScaleColumns& a, int64_t begin, int64_t end) {
  const auto* const bias = static_cast<const T*>(a.bias);
  for (int64_t r = begin; r < end; ++r) {
    const T *const x = row_of<T>(a.x, r), *const addend = row_of<T>(a.addend, r),
                   *const less = row_of<T>(a.subtrahend, r);
    T* const out = row_of<T>(a.out, r);
    each_vector(a.x.columns, [&](int64_t j, auto count) LM_BODY {
      F32 v = load(x + j, count);
      if (a.factors != nullptr) v = load(a.factors + j, count) * v;
      if (bias != nullptr) v = v + load(bias + j, count);
      if (addend != nullptr) v = v + load(addend + j, count);
      if (less != nullptr) v = v - load(less + j, count);
      store(out + j, v, count);
    });
  }
}

template <class T>
void scale_block_backward(const ScaleColumnsBackward& a, int64_t block) {
  const int64_t width = a.dy.columns, first = block * kRowBlock, end = std::min(a.dy.rows, first + kRowBlock);
  float* const sums = a.partial + block * width;
  std::fill_n(sums, width, 0.f);
  for (int64_t r = first; r < end; ++r) {
    const T *const dy = row_of<T>(a.dy, r), *const x = row_of<T>(a.x, r);
    T *const out = row_of<T>(a.out, r), *const rest = row_of<T>(a.rest, r);
    each_vector(width, [&](int64_t j, auto count) LM_BODY {
      const F32 v = load(dy + j, count), factor = load(a.factors + j, count);
      store(sums + j, load(sums + j, count) + v * load(x + j, count), count);
      store(out + j, factor * v, count);
      if (rest != nullptr) store(rest + j, (factor - F32(1.f)) * v, count);
    });
  }
}

}  // namespace

void adapted_norms(const AdaptedNorms& a, StreamView stream) {
  with_dtype("adapted_norms", a.weight.dtype, [&](auto weight) {
    with_dtype("adapted_norms", a.b.dtype, [&](auto factor) {
      parallel_for(stream.threads, a.weight.rows, row_grain(a.weight.columns),
                   [&](int64_t begin, int64_t end) {
                     norms_of_rows<decltype(weight), decltype(factor)>(a, begin, end);
                   });
    });
  });
}

void scale_columns(const ScaleColumns& a, StreamView stream) {
  with_dtype("scale_columns", a.x.dtype, [&](auto t) {
    parallel_for(stream.threads, a.x.rows, row_grain(a.x.columns),
                 [&](int64_t begin, int64_t end) { scale_rows<decltype(t)>(a, begin, end); });
  });
}

void scale_columns_backward(const ScaleColumnsBackward& a, StreamView stream) {
  const int64_t blocks = (a.dy.rows + kRowBlock - 1) / kRowBlock, width = a.dy.columns;
  with_dtype("scale_columns_backward", a.dy.dtype, [&](auto t) {
    parallel_for(stream.threads, blocks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) scale_block_backward<decltype(t)>(a, b);
    });
  });
  if (blocks == 0) return std::fill_n(a.sums, width, 0.f), void();
  sum_partials(a.partial, blocks, width, a.sums);
  if (a.norms == nullptr) return;
  each_vector(width, [&](int64_t j, auto count) LM_BODY {
    store(a.sums + j, load(a.sums + j, count) / load(a.norms + j, count), count);
  });
}

}  // namespace lm::LM_ISA
