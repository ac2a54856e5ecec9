// LayerNorm on the CPU. Passes over a row, all but the first out of L1. The variance is a sum over
// differences from the mean: the mean of squares less the square of the mean would lose all digits of a row
// whose mean is large.
#include "kernels/block_formula.h"
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

template <class Body>
LM_INLINE void with_offset(bool offset, const Body& body) {
  with_form(offset ? WeightForm::kOffset : WeightForm::kBeforeRounding, body);
}

// The mean of a row, added up in one order for forward and backward.
template <class T>
float row_mean(const T* x, int64_t width) {
  F32 total(0.f);
  each_vector(width, [&](int64_t j, auto count) LM_BODY { total = total + load(x + j, count); });
  return sum_lanes(total) / static_cast<float>(width);
}

// sum = x + residual, and its mean.
template <class T>
float add_rows(const T* x, const T* residual, T* sum, int64_t width) {
  F32 total(0.f);
  each_vector(width, [&](int64_t j, auto count) LM_BODY {
    const F32 v = round_as<T>(load(x + j, count) + load(residual + j, count));
    store_rounded(sum + j, v, count);
    total = total + v;
  });
  return sum_lanes(total) / static_cast<float>(width);
}

template <class T>
float row_variance(const T* x, float of_row, int64_t width) {
  const F32 mean(of_row);
  F32 squares(0.f);
  each_vector(width, [&](int64_t j, auto count) LM_BODY {
    const F32 d = tail_or(load(x + j, count) - mean, count, 0.f);  // the lanes behind the row are -mean
    squares = squares + d * d;
  });
  return sum_lanes(squares) / static_cast<float>(width);
}

template <class T, WeightForm kForm>
void forward_rows(const LayerNormForward& a, int64_t begin, int64_t end) {
  const T *weight = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias);
  for (int64_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(a.x) + r * a.x_stride;
    T* out = static_cast<T*>(a.out) + r * a.out_stride;
    float of_row = 0;
    if (a.residual != nullptr) {
      T* sum = static_cast<T*>(a.sum) + r * a.width;
      of_row = add_rows(x, static_cast<const T*>(a.residual) + r * a.width, sum, a.width);
      x = sum;
    } else {
      of_row = row_mean(x, a.width);
    }
    const float rstd = 1.f / __builtin_sqrtf(row_variance(x, of_row, a.width) + a.eps);
    if (a.rstd != nullptr) a.rstd[r] = rstd;
    const F32 mean(of_row), scale(rstd);
    each_vector(a.width, [&](int64_t j, auto count) LM_BODY {
      F32 y = norm_factor<kForm>(load(weight + j, count)) * ((load(x + j, count) - mean) * scale);
      if (bias != nullptr) y = y + load(bias + j, count);
      store(out + j, y, count);
    });
  }
}

// Row r; adds its part of the weight's and the bias's gradients to `dweight` and `dbias` (each may be null).
template <class T, WeightForm kForm>
void backward_row(const LayerNormBackward& a, int64_t r, float* dweight, float* dbias) {
  const T *dy = static_cast<const T*>(a.dy) + r * a.dy_stride,
          *x = static_cast<const T*>(a.x) + r * a.x_stride, *weight = static_cast<const T*>(a.weight),
          *dresidual = a.dresidual != nullptr ? static_cast<const T*>(a.dresidual) + r * a.width : nullptr;
  T* dx = static_cast<T*>(a.dx) + r * a.dx_stride;
  const F32 mean(row_mean(x, a.width)), scale(a.rstd[r]);
  F32 gradients(0.f), products(0.f);
  each_vector(a.width, [&](int64_t j, auto count) LM_BODY {
    const F32 d = norm_factor<kForm>(load(weight + j, count)) * load(dy + j, count);
    gradients = gradients + d;
    products = products + d * ((load(x + j, count) - mean) * scale);
  });
  const auto width = static_cast<float>(a.width);
  const F32 gradient_mean(sum_lanes(gradients) / width), product_mean(sum_lanes(products) / width);
  each_vector(a.width, [&](int64_t j, auto count) LM_BODY {
    const F32 gradient = load(dy + j, count), n = (load(x + j, count) - mean) * scale;
    if (dweight != nullptr) store(dweight + j, load(dweight + j, count) + gradient * n, count);
    if (dbias != nullptr) store(dbias + j, load(dbias + j, count) + gradient, count);
    const F32 d = norm_factor<kForm>(load(weight + j, count)) * gradient;
    F32 out = layer_norm_gradient(n, d, gradient_mean, product_mean, scale);
    if (dresidual != nullptr) out = load(dresidual + j, count) + out;
    store(dx + j, out, count);
  });
}

template <class T, WeightForm kForm>
void backward_block(const LayerNormBackward& a, int64_t block, int64_t blocks) {
  float* dweight = a.dweight != nullptr ? a.partial + block * a.width : nullptr;
  float* dbias = a.dbias != nullptr ? a.partial + (blocks + block) * a.width : nullptr;
  if (dweight != nullptr) std::fill_n(dweight, a.width, 0.f);
  if (dbias != nullptr) std::fill_n(dbias, a.width, 0.f);
  const int64_t end = std::min(a.rows, (block + 1) * kRowBlock);
  for (int64_t r = block * kRowBlock; r < end; ++r) backward_row<T, kForm>(a, r, dweight, dbias);
}

}  // namespace

void layer_norm_forward(const LayerNormForward& a, StreamView stream) {
  with_dtype("layer_norm_forward", a.dtype, [&](auto t) {
    with_offset(a.offset, [&](auto form) {
      parallel_for(stream.threads, a.rows, row_grain(a.width), [&](int64_t begin, int64_t end) {
        forward_rows<decltype(t), decltype(form)::value>(a, begin, end);
      });
    });
  });
}

void layer_norm_backward(const LayerNormBackward& a, StreamView stream) {
  const int64_t blocks = (a.rows + kRowBlock - 1) / kRowBlock;
  with_dtype("layer_norm_backward", a.dtype, [&](auto t) {
    with_offset(a.offset, [&](auto form) {
      parallel_for(stream.threads, blocks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) {
          backward_block<decltype(t), decltype(form)::value>(a, b, blocks);
        }
      });
    });
  });
  const auto finish = [&](const float* partial, float* sums) {
    if (blocks == 0) return std::fill_n(sums, a.width, 0.f), void();
    sum_partials(partial, blocks, a.width, sums);
  };
  if (a.dweight != nullptr) finish(a.partial, a.dweight);
  if (a.dbias != nullptr) finish(a.partial + blocks * a.width, a.dbias);
}

}  // namespace lm::LM_ISA
