// An optimizer's rule on the CPU: one pass over gradient, state and weight. Each range is walked in blocks of
// 64 elements, the unit of philox.h's numbers.
#include <utility>

#include "base/philox.h"
#include "kernels/cpu_launchers.h"
#include "kernels/master_formula.h"

namespace lm::LM_ISA {
namespace {

// The division and root of one vector fill the time of its cache misses, so the next ones are asked for
// early: with AdamW and a split master, 92 % of a same-traffic loop without this, 102 % with (Zen 4, one
// thread; 128 to 256 ahead are alike, 512 is worse). A prefetch past the end of an array is harmless.
inline constexpr int64_t kAhead = 128;
template <class T>
LM_INLINE void prefetch(const T* array, int64_t i) {
  __builtin_prefetch(array + i + kAhead, 1);
}
template <MasterForm form>
LM_INLINE void prefetch_weight(const RuleUpdate& a, int64_t i) {
  if constexpr (form == MasterForm::kWeight) {
    prefetch(static_cast<const float*>(a.weight), i);
  } else {
    prefetch(static_cast<const uint16_t*>(a.weight), i);
  }
  if constexpr (form == MasterForm::kF32) prefetch(static_cast<const float*>(a.master), i);
  if constexpr (form == MasterForm::kSplit) prefetch(static_cast<const uint16_t*>(a.master), i);
}

template <MasterForm form, class Count>
LM_INLINE F32 load_weight(const RuleUpdate& a, int64_t i, Count count) {
  if constexpr (form == MasterForm::kWeight) return load(static_cast<const float*>(a.weight) + i, count);
  if constexpr (form == MasterForm::kF32) return load(static_cast<const float*>(a.master) + i, count);
  if constexpr (form == MasterForm::kStochastic) return load(static_cast<const Bf16*>(a.weight) + i, count);
  return float_of(split_join(load_u16(static_cast<const uint16_t*>(a.weight) + i, count),
                             load_u16(static_cast<const uint16_t*>(a.master) + i, count)));
}

template <MasterForm form, class Count>
LM_INLINE void store_weight(const RuleUpdate& a, int64_t i, F32 p, U32 random, Count count) {
  uint16_t* half = static_cast<uint16_t*>(a.weight) + i;
  if constexpr (form == MasterForm::kWeight) {
    store(static_cast<float*>(a.weight) + i, p, count);
  } else if constexpr (form == MasterForm::kStochastic) {
    store_u16(half, stochastic_weight(bits_of(p), random), count);
  } else {
    store_u16(half, split_weight(bits_of(p)), count);
    if constexpr (form == MasterForm::kF32) store(static_cast<float*>(a.master) + i, p, count);
    if constexpr (form == MasterForm::kSplit) {
      store_u16(static_cast<uint16_t*>(a.master) + i, split_low(bits_of(p)), count);
    }
  }
}

// body(s) for s = 0, 1, ... n - 1, each a constant: what a loop would keep in an array stays in registers.
template <int n, class Body>
LM_INLINE void each_of(const Body& body) {
  const auto call = [&]<int... s>(std::integer_sequence<int, s...>) LM_BODY {
    (body(std::integral_constant<int, s>()), ...);
  };
  call(std::make_integer_sequence<int, n>());
}

template <class R, class G, MasterForm form>
void update_range(const RuleUpdate& a, int64_t begin, int64_t end) {
  constexpr int kStreams = kStreamCount<R>;
  const R rule = a.rule.as<R>();  // copied, so that stores through state cannot change it
  const F32 scale(a.gradient_scale);
  const G* gradient = static_cast<const G*>(a.gradient);
  const auto update = [&](int64_t i, U32 random, auto count) LM_BODY {
    prefetch(gradient, i);
    each_of<kStreams>([&](auto s) LM_BODY { prefetch(a.state[s], i); });
    prefetch_weight<form>(a, i);
    F32 state[kStreams], p = load_weight<form>(a, i, count);
    each_of<kStreams>([&](auto s) LM_BODY { state[s] = load(a.state[s] + i, count); });
    R::update(rule, load(gradient + i, count) * scale, state, p);
    each_of<kStreams>([&](auto s) LM_BODY { store(a.state[s] + i, one_nan(state[s]), count); });
    store_weight<form>(a, i, one_nan(p), random, count);
  };
  if constexpr (form == MasterForm::kStochastic) {
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

template <class R, class G>
void update_as(const RuleUpdate& a, int64_t begin, int64_t end) {
  switch (a.form) {
    case MasterForm::kWeight:
      return update_range<R, G, MasterForm::kWeight>(a, begin, end);
    case MasterForm::kSplit:
      return update_range<R, G, MasterForm::kSplit>(a, begin, end);
    case MasterForm::kF32:
      return update_range<R, G, MasterForm::kF32>(a, begin, end);
    case MasterForm::kStochastic:
      return update_range<R, G, MasterForm::kStochastic>(a, begin, end);
  }
}

}  // namespace

void update(const RuleUpdate& a, StreamView stream) {
  const DType weight = a.form == MasterForm::kWeight ? DType::kF32 : DType::kBF16;
  if (a.weight_dtype != weight) refuse_dtype("update (weight)", a.weight_dtype);
  if (a.first_index % 64 != 0) refuse_arguments("update", "first_index is no multiple of 64");
  Rules::with(a.rule.id, [&](auto rule) {
    with_dtype("update", a.gradient_dtype, [&](auto gradient) {
      parallel_elements(stream.threads, a.elements, [&](int64_t begin, int64_t end) {
        update_as<typename decltype(rule)::type, decltype(gradient)>(a, begin, end);
      });
    });
  });
}

}  // namespace lm::LM_ISA
