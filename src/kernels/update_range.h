// Helpers of the CPU's updates: the forms of a weight, and loops over state tensors. Included by a source of
// one instruction set.
#pragma once

#include <utility>

#include "base/philox.h"
#include "kernels/cpu_launchers.h"
#include "kernels/master_formula.h"

namespace lm::LM_ISA {
namespace {

// The division and root of one vector hide cache misses, so the next vectors are prefetched. Of a
// same-traffic loop's speed, AdamW in fp32 / with a split master reaches on one thread of a Zen 5 98 / 105 %
// with 64 to 96 ahead, 85 / 96 % with 128, 91 / 97 % with 256; a Zen 4 has 92 % (split) without and 102 %
// with 128. A prefetch past the end of an array is harmless.
inline constexpr int64_t kAhead = 80;
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
  if constexpr (has_fp32_master(form)) prefetch(static_cast<const float*>(a.master), i);
  if constexpr (form == MasterForm::kSplit) prefetch(static_cast<const uint16_t*>(a.master), i);
}

template <MasterForm form, class Count>
LM_INLINE F32 load_weight(const RuleUpdate& a, int64_t i, Count count) {
  if constexpr (form == MasterForm::kWeight) return load(static_cast<const float*>(a.weight) + i, count);
  if constexpr (has_fp32_master(form)) return load(static_cast<const float*>(a.master) + i, count);
  if constexpr (form == MasterForm::kStochasticFp16)
    return load(static_cast<const Fp16*>(a.weight) + i, count);
  if constexpr (form == MasterForm::kStochastic || form == MasterForm::kNearest)
    return load(static_cast<const Bf16*>(a.weight) + i, count);
  return float_of(split_join(load_u16(static_cast<const uint16_t*>(a.weight) + i, count),
                             load_u16(static_cast<const uint16_t*>(a.master) + i, count)));
}

template <MasterForm form, class Count>
LM_INLINE void store_weight(const RuleUpdate& a, int64_t i, F32 p, U32 random, Count count) {
  uint16_t* half = static_cast<uint16_t*>(a.weight) + i;
  if constexpr (form == MasterForm::kWeight) {
    store(static_cast<float*>(a.weight) + i, p, count);
  } else if constexpr (form == MasterForm::kStochasticFp16) {
    store(static_cast<Fp16*>(a.weight) + i, stochastic_fp16(p, random), count);
  } else if constexpr (form == MasterForm::kF32OfFp16) {
    store(static_cast<Fp16*>(a.weight) + i, p, count);
    store(static_cast<float*>(a.master) + i, p, count);
  } else if constexpr (form == MasterForm::kStochastic) {
    store_u16(half, stochastic_weight(bits_of(p), random), count);
  } else if constexpr (form == MasterForm::kNearest) {
    store_u16(half, bf16_bits(p), count);
  } else {
    store_u16(half, split_weight(bits_of(p)), count);
    if constexpr (form == MasterForm::kF32) store(static_cast<float*>(a.master) + i, p, count);
    if constexpr (form == MasterForm::kSplit) {
      store_u16(static_cast<uint16_t*>(a.master) + i, split_low(bits_of(p)), count);
    }
  }
}

// body(s) for s = 0, 1, ... n - 1, each a constant, so that values stay in registers where a loop would need
// an array.
template <int n, class Body>
LM_INLINE void each_of(const Body& body) {
  const auto call = [&]<int... s>(std::integer_sequence<int, s...>) LM_BODY {
    (body(std::integral_constant<int, s>()), ...);
  };
  call(std::make_integer_sequence<int, n>());
}

// Random numbers for stochastic rounding of elements [first, first + 64) of a range: word w for 16 of them.
LM_INLINE PhiloxWords<U32> rounding_numbers(const RuleUpdate& a, int64_t first) {
  const uint64_t call = static_cast<uint64_t>(a.first_index + first) / 4;
  return philox<U32>(a.rounding_key, lane_numbers() + U32(static_cast<uint32_t>(call)),
                     U32(static_cast<uint32_t>(call >> 32)), U32(0), U32(0));
}

// Random numbers for stochastic rounding from any element on: those of two blocks of 64.
class Numbers {
 public:
  explicit Numbers(const RuleUpdate& a) : a_(a) {}
  U32 at(int64_t i) {
    const int64_t index = a_.first_index + i, block = index / 64;
    for (int64_t half = 0; half < 2 && block != block_; ++half) {
      const PhiloxWords<U32> numbers = rounding_numbers(a_, (block + half) * 64 - a_.first_index);
      for (int w = 0; w < 4; ++w) store(number_ + half * 64 + w * kLanes, float_of(numbers.word[w]), Whole{});
    }
    block_ = block;
    return bits_of(load(number_ + index % 64, Whole{}));
  }

 private:
  const RuleUpdate& a_;
  int64_t block_ = -1;
  float number_[128] = {};
};

}  // namespace
}  // namespace lm::LM_ISA
