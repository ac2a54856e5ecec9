// Rotary embedding on the CPU, in place, and the scale by position of queries behind it.
#include "kernels/block_formula.h"
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

// Sixteen pairs of neighbours: `first` has the first of each, `second` the second.
struct Pairs {
  F32 first, second;
};
// Lanes 2i (odd: 2i + 1) of two native vectors in a row.
LM_INLINE NativeF32 every_second(NativeF32 a, NativeF32 b, bool odd) {
#if defined(__AVX512F__)
  return odd ? __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
             : __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
#elif defined(__AVX2__)
  return odd ? __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)
             : __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
#else
  return odd ? __builtin_shufflevector(a, b, 1, 3, 5, 7) : __builtin_shufflevector(a, b, 0, 2, 4, 6);
#endif
}
// The way back: a0 b0 a1 b1 ..., of it the lower or the upper native vector.
LM_INLINE NativeF32 alternating(NativeF32 a, NativeF32 b, bool upper) {
#if defined(__AVX512F__)
  return upper ? __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
               : __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#elif defined(__AVX2__)
  return upper ? __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
               : __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
#else
  return upper ? __builtin_shufflevector(a, b, 2, 6, 3, 7) : __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
}

template <class T>
LM_INLINE Pairs load_pairs(const T* from) {
  const F32 low = load(from, Whole{}), high = load(from + kLanes, Whole{});
  NativeF32 all[2 * kParts];
  for (int p = 0; p < kParts; ++p) all[p] = low.part[p], all[kParts + p] = high.part[p];
  Pairs r;
  for (int p = 0; p < kParts; ++p) {
    r.first.part[p] = every_second(all[2 * p], all[2 * p + 1], false);
    r.second.part[p] = every_second(all[2 * p], all[2 * p + 1], true);
  }
  return r;
}
template <class T>
LM_INLINE void store_pairs(T* to, const Pairs& pairs) {
  NativeF32 all[2 * kParts];
  for (int p = 0; p < kParts; ++p) {
    all[2 * p] = alternating(pairs.first.part[p], pairs.second.part[p], false);
    all[2 * p + 1] = alternating(pairs.first.part[p], pairs.second.part[p], true);
  }
  F32 low, high;
  for (int p = 0; p < kParts; ++p) low.part[p] = all[p], high.part[p] = all[kParts + p];
  store(to, low, Whole{});
  store(to + kLanes, high, Whole{});
}
template <class T>
LM_INLINE Pairs load_pairs(const T* from, Whole) {
  return load_pairs(from);
}
template <class T>
LM_INLINE void store_pairs(T* to, const Pairs& pairs, Whole) {
  store_pairs(to, pairs);
}
template <class T>
LM_INLINE Pairs load_pairs(const T* from, Part count) {
  T whole[2 * kLanes] = {};
  memcpy(whole, from, 2 * sizeof(T) * static_cast<size_t>(count.n));
  return load_pairs(whole);
}
template <class T>
LM_INLINE void store_pairs(T* to, const Pairs& pairs, Part count) {
  T whole[2 * kLanes];
  store_pairs(whole, pairs);
  memcpy(to, whole, 2 * sizeof(T) * static_cast<size_t>(count.n));
}

template <class T>
void rotate_rows(const Rope& a, int64_t begin, int64_t end) {
  const int64_t half = a.turned() / 2;
  const F32 sign(a.inverse ? -1.f : 1.f);
  for (int64_t r = begin; r < end; ++r) {
    const float* cos = a.cos + a.position[r] * half;
    const float* sin = a.sin + a.position[r] * half;
    for (int64_t h = 0; h < a.heads; ++h) {
      T* low = static_cast<T*>(a.x) + r * a.x_stride + h * a.head_dim;
      T* high = low + half;
      each_vector(half, [&](int64_t i, auto count) LM_BODY {
        const F32 c = load(cos + i, count), s = load(sin + i, count) * sign;
        F32 x = load(low + i, count), y = load(high + i, count);
        rope_turn(c, s, x, y);
        store(low + i, x, count);
        store(high + i, y, count);
      });
    }
  }
}

template <class T>
void rotate_neighbours(const Rope& a, int64_t begin, int64_t end) {
  const int64_t half = a.turned() / 2;
  const F32 sign(a.inverse ? -1.f : 1.f);
  for (int64_t r = begin; r < end; ++r) {
    const float* cos = a.cos + a.position[r] * half;
    const float* sin = a.sin + a.position[r] * half;
    for (int64_t h = 0; h < a.heads; ++h) {
      T* x = static_cast<T*>(a.x) + r * a.x_stride + h * a.head_dim;
      each_vector(half, [&](int64_t i, auto count) LM_BODY {
        const F32 c = load(cos + i, count), s = load(sin + i, count) * sign;
        Pairs pairs = load_pairs(x + 2 * i, count);
        rope_turn(c, s, pairs.first, pairs.second);
        store_pairs(x + 2 * i, pairs, count);
      });
    }
  }
}

template <class T>
void scale_rows(const ScaleByPosition& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const float factor = position_factor<T>(a.position[r], a.period, a.slope);
    if (factor == 1) continue;  // all of a text that is no longer than the period
    T* x = static_cast<T*>(a.x) + r * a.stride;
    each_vector(a.width, [&](int64_t j, auto count)
                             LM_BODY { store(x + j, load(x + j, count) * F32(factor), count); });
  }
}

}  // namespace

void rope(const Rope& a, StreamView stream) {
  with_dtype("rope", a.dtype, [&](auto t) {
    parallel_for(stream.threads, a.rows, row_grain(a.heads * a.head_dim), [&](int64_t begin, int64_t end) {
      if (a.neighbours) return rotate_neighbours<decltype(t)>(a, begin, end);
      rotate_rows<decltype(t)>(a, begin, end);
    });
  });
}

void scale_by_position(const ScaleByPosition& a, StreamView stream) {
  with_dtype("scale_by_position", a.dtype, [&](auto t) {
    parallel_for(stream.threads, a.rows, row_grain(a.width),
                 [&](int64_t begin, int64_t end) { scale_rows<decltype(t)>(a, begin, end); });
  });
}

}  // namespace lm::LM_ISA
