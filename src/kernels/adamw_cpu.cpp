// AdamW on the CPU: one pass over gradient, state and weight. Each range is walked in blocks of 64 elements,
// the unit of philox.h's numbers.
#include "kernels/adamw_formula.h"
#include "kernels/cpu_launchers.h"

namespace lm::LM_ISA {
namespace {

using Master = AdamW::Master;

// The division and root of one vector fill the time of its cache misses, so the next ones are asked for
// early: with a split master, 92 % of a same-traffic loop without this, 102 % with (Zen 4, one thread; 128 to
// 256 ahead are alike, 512 is worse). A prefetch past the end of an array is harmless.
inline constexpr int64_t kAhead = 128;
template <class T>
LM_INLINE void prefetch(const T* array, int64_t i) {
  __builtin_prefetch(array + i + kAhead, 1);
}
template <class G, Master mode>
LM_INLINE void prefetch_all(const AdamW& a, int64_t i) {
  prefetch(static_cast<const G*>(a.gradient), i);
  prefetch(a.m, i);
  prefetch(a.v, i);
  if constexpr (mode == Master::kWeight) {
    prefetch(static_cast<const float*>(a.weight), i);
  } else {
    prefetch(static_cast<const uint16_t*>(a.weight), i);
  }
  if constexpr (mode == Master::kF32) prefetch(static_cast<const float*>(a.master), i);
  if constexpr (mode == Master::kSplit) prefetch(static_cast<const uint16_t*>(a.master), i);
}

template <Master mode, class Count>
LM_INLINE F32 load_weight(const AdamW& a, int64_t i, Count count) {
  if constexpr (mode == Master::kWeight) return load(static_cast<const float*>(a.weight) + i, count);
  if constexpr (mode == Master::kF32) return load(static_cast<const float*>(a.master) + i, count);
  if constexpr (mode == Master::kStochastic) return load(static_cast<const Bf16*>(a.weight) + i, count);
  return float_of(split_join(load_u16(static_cast<const uint16_t*>(a.weight) + i, count),
                             load_u16(static_cast<const uint16_t*>(a.master) + i, count)));
}

template <Master mode, class Count>
LM_INLINE void store_weight(const AdamW& a, int64_t i, F32 p, U32 random, Count count) {
  uint16_t* half = static_cast<uint16_t*>(a.weight) + i;
  if constexpr (mode == Master::kWeight) {
    store(static_cast<float*>(a.weight) + i, p, count);
  } else if constexpr (mode == Master::kStochastic) {
    store_u16(half, stochastic_weight(bits_of(p), random), count);
  } else {
    store_u16(half, split_weight(bits_of(p)), count);
    if constexpr (mode == Master::kF32) store(static_cast<float*>(a.master) + i, p, count);
    if constexpr (mode == Master::kSplit) {
      store_u16(static_cast<uint16_t*>(a.master) + i, split_low(bits_of(p)), count);
    }
  }
}

template <class G, Master mode>
void update_range(const AdamW& a, int64_t begin, int64_t end) {
  const AdamWConstants<F32> constants = adamw_constants<F32>(a);
  const G* gradient = static_cast<const G*>(a.gradient);
  const auto update = [&](int64_t i, U32 random, auto count) LM_BODY {
    prefetch_all<G, mode>(a, i);
    F32 m = load(a.m + i, count), v = load(a.v + i, count), p = load_weight<mode>(a, i, count);
    adamw_update(constants, load(gradient + i, count), m, v, p);
    store(a.m + i, m, count);
    store(a.v + i, v, count);
    store_weight<mode>(a, i, p, random, count);
  };
  if constexpr (mode == Master::kStochastic) {
    for (int64_t first = begin; first < end; first += 64) {
      const uint64_t call = static_cast<uint64_t>(a.first_index + first) / 4;
      const PhiloxWords<U32> numbers =
          philox<U32>(a.rounding_key, lane_numbers() + U32(static_cast<uint32_t>(call)),
                      U32(static_cast<uint32_t>(call >> 32)), U32(0), U32(0));
      for (int w = 0; w < 4 && first + w * kLanes < end; ++w) {
        const int64_t i = first + w * kLanes;
        if (i + kLanes <= end) {
          update(i, numbers.word[w], Whole{});
        } else {
          update(i, numbers.word[w], Part{static_cast<int>(end - i)});
        }
      }
    }
  } else {
    each_vector(end - begin, [&](int64_t i, auto count) LM_BODY { update(begin + i, U32(0), count); });
  }
}

template <class G>
void update(const AdamW& a, int64_t begin, int64_t end) {
  switch (a.mode) {
    case Master::kWeight:
      return update_range<G, Master::kWeight>(a, begin, end);
    case Master::kSplit:
      return update_range<G, Master::kSplit>(a, begin, end);
    case Master::kF32:
      return update_range<G, Master::kF32>(a, begin, end);
    case Master::kStochastic:
      return update_range<G, Master::kStochastic>(a, begin, end);
  }
}

}  // namespace

void adamw(const AdamW& a, StreamView stream) {
  const DType weight = a.mode == Master::kWeight ? DType::kF32 : DType::kBF16;
  if (a.weight_dtype != weight) refuse_dtype("adamw (weight)", a.weight_dtype);
  if (a.first_index % 64 != 0) refuse_arguments("adamw", "first_index is no multiple of 64");
  with_dtype("adamw", a.gradient_dtype, [&](auto t) {
    parallel_elements(stream.threads, a.elements,
                      [&](int64_t begin, int64_t end) { update<decltype(t)>(a, begin, end); });
  });
}

}  // namespace lm::LM_ISA
