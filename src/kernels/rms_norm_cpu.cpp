// RMSNorm on the CPU. Two passes over a row, the second out of L1: 3 KB at width 1536 in bf16.
#include "kernels/block_formula.h"
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

// What the loops know of the weight when they are compiled.
template <WeightForm kOf, bool kAny>
struct Weighting {
  static constexpr WeightForm kForm = kOf;
  static constexpr bool kGiven = kAny;
};

// Calls body(Weighting). Without a weight its form does not matter.
template <class Body>
LM_INLINE void with_weighting(const void* weight, WeightForm form, const Body& body) {
  if (weight == nullptr) return body(Weighting<WeightForm::kBeforeRounding, false>{});
  with_form(form, [&](auto constant) LM_BODY { body(Weighting<decltype(constant)::value, true>{}); });
}

template <class Weights, class T, class Count>
LM_INLINE F32 factor_at(const T* weight, int64_t j, Count count) {
  if constexpr (Weights::kGiven) {
    return norm_factor<Weights::kForm>(load(weight + j, count));
  } else {
    return F32(1.f);
  }
}

// The second pass over a vector of x.
template <class T, class Weights>
void write_vector(const RmsNormForward& a, const T* x, const T* add_to, float rstd, T* out) {
  const T* weight = static_cast<const T*>(a.weight);
  const F32 scale(rstd);
  const auto output = [&](int64_t j, auto count) LM_BODY {
    return factor_at<Weights>(weight, j, count) * norm_input<T, Weights::kForm>(load(x + j, count) * scale);
  };
  if (add_to == nullptr) {
    each_vector(a.width, [&](int64_t j, auto count) LM_BODY { store(out + j, output(j, count), count); });
    return;
  }
  const F32 factor(a.factor);
  const bool scaled = a.factor != 1;
  each_vector(a.width, [&](int64_t j, auto count) LM_BODY {
    store(out + j, norm_added<T>(load(add_to + j, count), output(j, count), factor, scaled), count);
  });
}

template <class T, class Weights>
void forward_rows(const RmsNormForward& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    for (int64_t g = 0; g < a.groups; ++g) {
      const T* x = static_cast<const T*>(a.x) + r * a.x_stride + g * a.width;
      T* out = static_cast<T*>(a.out) + r * a.out_stride + g * a.width;
      F32 squares(0.f);
      if (a.residual != nullptr) {
        const T* residual = static_cast<const T*>(a.residual) + r * a.width;
        T* sum = static_cast<T*>(a.sum) + r * a.width;
        each_vector(a.width, [&](int64_t j, auto count) LM_BODY {
          const F32 v = round_as<T>(load(x + j, count) + load(residual + j, count));
          store_rounded(sum + j, v, count);
          squares = squares + v * v;
        });
        x = sum;
      } else {
        each_vector(a.width, [&](int64_t j, auto count) LM_BODY {
          const F32 v = load(x + j, count);
          squares = squares + v * v;
        });
      }
      const float mean = sum_lanes(squares) / static_cast<float>(a.width);
      const float rstd = 1.f / __builtin_sqrtf(mean + a.eps);
      if (a.rstd != nullptr) a.rstd[r * a.groups + g] = rstd;
      const T* add_to = a.add_to != nullptr ? static_cast<const T*>(a.add_to) + r * a.width : nullptr;
      write_vector<T, Weights>(a, x, add_to, rstd, out);
    }
  }
}

// One vector of `width`. Null: `dresidual` is not added, the gradient of the weight is not wanted.
template <class T>
struct BackwardVector {
  const T *dy, *x, *weight, *dresidual;
  T* dx;
  float* dweight;  // its part is added
};
template <class T, class Weights>
void backward_vector(const BackwardVector<T>& v, float rstd, int64_t width) {
  const T *const dy = v.dy, *const x = v.x, *const weight = v.weight, *const dresidual = v.dresidual;
  T* const dx = v.dx;
  float* const dweight = v.dweight;
  const F32 scale(rstd);
  F32 dots(0.f);
  each_vector(width, [&](int64_t j, auto count) LM_BODY {
    dots = dots + factor_at<Weights>(weight, j, count) * load(dy + j, count) * (load(x + j, count) * scale);
  });
  const F32 mean(sum_lanes(dots) / static_cast<float>(width));
  each_vector(width, [&](int64_t j, auto count) LM_BODY {
    const F32 gradient = load(dy + j, count), n = load(x + j, count) * scale;
    if (dweight != nullptr)
      store(dweight + j, load(dweight + j, count) + gradient * norm_input<T, Weights::kForm>(n), count);
    F32 d = rms_norm_gradient(n, gradient, factor_at<Weights>(weight, j, count), mean, scale);
    if (dresidual != nullptr) d = load(dresidual + j, count) + d;
    store(dx + j, d, count);
  });
}

template <class T, class Weights>
void backward_block(const RmsNormBackward& a, int64_t block) {
  float* dweight = a.dweight != nullptr ? a.partial + block * a.width : nullptr;
  if (dweight != nullptr) std::fill_n(dweight, a.width, 0.f);
  const int64_t end = std::min(a.rows, (block + 1) * kRowBlock);
  for (int64_t r = block * kRowBlock; r < end; ++r) {
    for (int64_t g = 0; g < a.groups; ++g) {
      const int64_t j = g * a.width;
      backward_vector<T, Weights>(
          {.dy = static_cast<const T*>(a.dy) + r * a.dy_stride + j,
           .x = static_cast<const T*>(a.x) + r * a.x_stride + j,
           .weight = static_cast<const T*>(a.weight),
           .dresidual = a.dresidual != nullptr ? static_cast<const T*>(a.dresidual) + r * a.width : nullptr,
           .dx = static_cast<T*>(a.dx) + r * a.dx_stride + j,
           .dweight = dweight},
          a.rstd[r * a.groups + g], a.width);
    }
  }
}

}  // namespace

void rms_norm_forward(const RmsNormForward& a, StreamView stream) {
  with_dtype("rms_norm_forward", a.dtype, [&](auto t) {
    with_weighting(a.weight, a.form, [&](auto weights) {
      parallel_for(stream.threads, a.rows, row_grain(a.groups * a.width), [&](int64_t begin, int64_t end) {
        forward_rows<decltype(t), decltype(weights)>(a, begin, end);
      });
    });
  });
}

void rms_norm_backward(const RmsNormBackward& a, StreamView stream) {
  const int64_t blocks = (a.rows + kRowBlock - 1) / kRowBlock;
  with_dtype("rms_norm_backward", a.dtype, [&](auto t) {
    with_weighting(a.weight, a.form, [&](auto weights) {
      parallel_for(stream.threads, blocks, 1, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) backward_block<decltype(t), decltype(weights)>(a, b);
      });
    });
  });
  if (a.dweight == nullptr) return;
  if (blocks == 0) return std::fill_n(a.dweight, a.width, 0.f), void();
  sum_partials(a.partial, blocks, a.width, a.dweight);
}

}  // namespace lm::LM_ISA
