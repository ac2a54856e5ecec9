// Rules with quantized state, on the CPU: 256 elements are updated with their state in fp32 on the stack,
// which is then quantized. Included by a source of one instruction set.
#pragma once

#include <bit>

#include "kernels/code8_lanes.h"

namespace lm::LM_ISA {
namespace {

// The values of 64 codes from element i on, in turned order.
template <CodeMap map>
LM_INLINE Wide read_codes(const uint8_t* codes, int64_t i) {
  if constexpr (code_bits(map) == 4) {
    const F32 values = load(kTable<map>.value, Whole{});
    return turned(
        wide_of([&](int v) LM_BODY { return look_up(values, load_halves(codes + (i + v * kLanes) / 2)); }));
  } else {
    return values_of_64<map>(codes + i);
  }
}
template <CodeMap map>
LM_INLINE void write_codes(uint8_t* codes, int64_t i, U32 numbers) {
  if constexpr (code_bits(map) == 4) {
    store_halves(codes + i / 2, numbers);
  } else {
    store_u8(codes + i, numbers);
  }
}

// Stores states until they are quantized: turned if codes are packed from turned vectors, else in order.
template <CodeMap map>
LM_INLINE void keep_states(float* to, Wide states) {
  store(to, kJoinsCodes<map> ? states : in_order(states), Whole4{});
}

// The codes of states before they are stored, 64 at once: codes, or the input of the packing.
template <CodeMap map>
LM_INLINE U32 code_numbers(F32 states, F32 factor) {
  const F32 x = over_scale<map>(states, factor);
  if constexpr (kJoinsCodes<map>) {
    return joinable_numbers<map>(x);
  } else {
    return nearest_code<map>(kTable<map>, x);
  }
}
// Writes from element i on.
template <CodeMap map>
LM_INLINE void write_numbers(uint8_t* codes, int64_t i, const WideU32& numbers) {
  if constexpr (kJoinsCodes<map>) {
    join_numbers<map>(codes + i, numbers);
  } else {
    each_of<kWide>([&](auto v) LM_BODY { write_codes<map>(codes, i + v * kLanes, numbers.of[v]); });
  }
}

// The largest magnitude in each lane, as bits, whose order is that of the numbers: infinity and NaN are not
// below kInfinity. A state quantized without a sign is negative only if its scale was damaged; its sign bit
// remains, so that it is not below kInfinity either.
constexpr uint32_t kInfinity = 0x7F800000;
template <CodeMap map>
LM_INLINE void keep_largest(U32& largest, F32 x) {
  const U32 bits = map == CodeMap::kUnsigned8 ? bits_of(x) : bits_of(magnitude(x));
  for (int p = 0; p < kParts; ++p)
    largest.part[p] = largest.part[p] < bits.part[p] ? bits.part[p] : largest.part[p];
}
LM_INLINE uint32_t largest_lane(U32 a) {
  alignas(64) uint32_t lane[kLanes];
  memcpy(lane, &a, sizeof lane);
  uint32_t out = 0;
  for (int l = 0; l < kLanes; ++l) out = lane[l] > out ? lane[l] : out;
  return out;
}

// Sets non-finite states of a block to 0; returns the largest magnitude, negative ones included.
template <int64_t n>
[[gnu::noinline]] float largest_of_numbers(float* values) {
  U32 largest(0);
  for (int64_t at = 0; at < n; at += kLanes) {
    const F32 x = coded_state(load(values + at, Whole{}));
    store(values + at, x, Whole{});
    keep_largest<CodeMap::kSigned8>(largest, x);
  }
  return std::bit_cast<float>(largest_lane(largest));
}

// 64 weights from element i on, in turned order.
template <MasterForm form>
LM_INLINE Wide load_weights(const RuleUpdate& a, int64_t i) {
  const uint16_t* half = static_cast<const uint16_t*>(a.weight) + i;
  if constexpr (form == MasterForm::kWeight) return load_turned(static_cast<const float*>(a.weight) + i);
  if constexpr (has_fp32_master(form)) return load_turned(static_cast<const float*>(a.master) + i);
  if constexpr (form == MasterForm::kStochastic) return load_turned(static_cast<const Bf16*>(a.weight) + i);
  if constexpr (form == MasterForm::kStochasticFp16)
    return load_turned(static_cast<const Fp16*>(a.weight) + i);
  return load_turned_split(half, static_cast<const uint16_t*>(a.master) + i);
}
// Random numbers for 64 weights, by their bits.
LM_INLINE Wide turned_numbers(const RuleUpdate& a, int64_t i) {
  const PhiloxWords<U32> numbers = rounding_numbers(a, i);
  return turned(wide_of([&](int v) LM_BODY { return float_of(numbers.word[v]); }));
}
template <MasterForm form>
LM_INLINE void store_weights(const RuleUpdate& a, int64_t i, Wide p) {
  uint16_t* half = static_cast<uint16_t*>(a.weight) + i;
  const auto each = [&](const auto& of) LM_BODY {
    WideU32 r;
    each_of<kWide>([&](auto v) LM_BODY { r.of[v] = of(bits_of(p.of[v]), int{v}); });
    return r;
  };
  if constexpr (form == MasterForm::kWeight) {
    store_turned(static_cast<float*>(a.weight) + i, p);
  } else if constexpr (form == MasterForm::kF32OfFp16) {
    store_turned(static_cast<Fp16*>(a.weight) + i, p);
    store_turned(static_cast<float*>(a.master) + i, p);
  } else if constexpr (form == MasterForm::kStochasticFp16) {
    const Wide random = turned_numbers(a, i);
    store_turned(static_cast<Fp16*>(a.weight) + i,
                 wide_of([&](int v) LM_BODY { return stochastic_fp16(p.of[v], bits_of(random.of[v])); }));
  } else if constexpr (form == MasterForm::kStochastic) {
    const Wide random = turned_numbers(a, i);
    store_turned_halves<false>(
        half, each([&](U32 bits, int v) LM_BODY { return stochastic_weight(bits, bits_of(random.of[v])); }));
  } else {
    store_turned_halves<true>(half, each([](U32 bits, int) LM_BODY { return split_rounded(bits); }));
    if constexpr (form == MasterForm::kF32) store_turned(static_cast<float*>(a.master) + i, p);
    if constexpr (form == MasterForm::kSplit)
      store_turned_halves<false>(static_cast<uint16_t*>(a.master) + i, bits_of(p));
  }
}

// one_nan() for vectors that rarely have a NaN.
LM_INLINE Wide one_nan(Wide a) {
#if defined(__AVX512F__)
  const auto nan = [&](int v) LM_BODY {
    return _mm512_cmp_ps_mask((__m512)a.of[v].part[0], (__m512)a.of[v + 1].part[0], _CMP_UNORD_Q);
  };
  if (__builtin_expect((nan(0) | nan(2)) == 0, 1)) return a;
#endif
  return wide_of([&](int v) LM_BODY { return one_nan(a.of[v]); });
}

// Prefetches the cache lines of 64 elements.
template <class T>
LM_INLINE void prefetch_lines(const T* array, int64_t i) {
  each_of<sizeof(T)>([&](auto line) LM_BODY { prefetch(array, i + line * 64 / sizeof(T)); });
}
template <MasterForm form>
LM_INLINE void prefetch_weights(const RuleUpdate& a, int64_t i) {
  using Weight = std::conditional_t<form == MasterForm::kWeight, float, uint16_t>;
  prefetch_lines(static_cast<const Weight*>(a.weight), i);
  if constexpr (has_fp32_master(form)) prefetch_lines(static_cast<const float*>(a.master), i);
  if constexpr (form == MasterForm::kSplit) prefetch_lines(static_cast<const uint16_t*>(a.master), i);
}

// The updated states of a block until they are quantized, which needs its largest magnitude.
template <class R>
struct BlockStates {
  static constexpr int64_t kBlock = code_block(R::kCodes[0]), kBlocks = kCodeBlock / kBlock;
  float value[kStateCount<R>][kCodeBlock];
  F32 factor[kStateCount<R>][kBlocks];
};

// If `updates`: updates the block that begins at element `first` and stores its states in `states`. If
// `codes`: quantizes those of the block before it, in `previous`.
template <class R, class G, MasterForm form, bool updates, bool codes>
LM_INLINE void update_block(const RuleUpdate& a, const R& rule, int64_t first, BlockStates<R>& states,
                            const BlockStates<R>& previous) {
  constexpr int kStates = kStateCount<R>;
  constexpr int64_t kBlock = BlockStates<R>::kBlock, kBlocks = BlockStates<R>::kBlocks;
  const int64_t block = first / kBlock;
  const G* gradient = static_cast<const G*>(a.gradient);
  const F32 gradient_scale(a.gradient_scale);
  U32 largest[kStates][kBlocks];
  each_of<kStates>([&](auto s) LM_BODY {
    for (U32& of_block : largest[s]) of_block = U32(0);
  });
  for (int64_t begin = 0; begin < kCodeBlock; begin += kWide * kLanes) {
    const int64_t i = first + begin;
    F32 scale[kStates];
    Wide read[kStates], g, p;
    WideU32 coded[kStates];
    if constexpr (updates) {
      prefetch_lines(gradient, i);
      prefetch_weights<form>(a, i);
      each_of<kStates>([&](auto s) LM_BODY {
        scale[s] = F32(static_cast<const float*>(a.state[s])[block + begin / kBlock]);
        read[s] = read_codes<R::kCodes[decltype(s)::value]>(a.codes[s], i);
      });
      g = load_turned(gradient + i);
      p = load_weights<form>(a, i);
    }
    each_of<kWide>([&](auto v) LM_BODY {
      if constexpr (updates) {
        F32 state[kStates];
        each_of<kStates>([&](auto s) LM_BODY { state[s] = read[s].of[v] * scale[s]; });
        R::update(rule, g.of[v] * gradient_scale, state, p.of[v]);
        each_of<kStates>([&](auto s) LM_BODY {
          keep_largest<R::kCodes[decltype(s)::value]>(largest[s][begin / kBlock], state[s]);
          read[s].of[v] = state[s];
        });
      }
      if constexpr (codes) {
        each_of<kStates>([&](auto s) LM_BODY {
          coded[s].of[v] = code_numbers<R::kCodes[decltype(s)::value]>(
              load(previous.value[s] + begin + v * kLanes, Whole{}), previous.factor[s][begin / kBlock]);
        });
      }
    });
    if constexpr (updates) {
      each_of<kStates>([&](auto s) LM_BODY {
        keep_states<R::kCodes[decltype(s)::value]>(states.value[s] + begin, read[s]);
      });
      store_weights<form>(a, i, one_nan(p));
    }
    if constexpr (codes) {
      each_of<kStates>([&](auto s) LM_BODY {
        write_numbers<R::kCodes[decltype(s)::value]>(a.codes[s], i - kCodeBlock, coded[s]);
      });
    }
  }
  if constexpr (updates) {
    each_of<kStates>([&](auto s) LM_BODY {
      constexpr CodeMap map = R::kCodes[decltype(s)::value];
      static_assert(code_block(map) == kBlock);
      for (int64_t b = 0; b < kBlocks; ++b) {
        const uint32_t bits = largest_lane(largest[s][b]);
        const float top = bits < kInfinity ? std::bit_cast<float>(bits)
                                           : largest_of_numbers<kBlock>(states.value[s] + b * kBlock);
        states.factor[s][b] = F32(code_factor<map>(top));
        static_cast<float*>(a.state[s])[block + b] = code_scale<map>(top);
      }
    });
  }
}

// With AVX-512 a block is quantized while the next one is updated: the divisions and roots of one overlap
// with the permutations of the other. (Arguments are copied, so that stores through state cannot alias them.)
template <class R, class G, MasterForm form>
void update_blocks(const RuleUpdate& args, int64_t begin, int64_t end) {
  if (begin == end) return;
  const RuleUpdate a = args;
  const R rule = a.rule.as<R>();
  BlockStates<R> states[2];
  const auto step = [&](auto updates, auto codes, int64_t block) LM_BODY {
    update_block<R, G, form, decltype(updates)::value, decltype(codes)::value>(
        a, rule, block * kCodeBlock, states[block % 2], states[1 - block % 2]);
  };
  constexpr std::true_type yes;
  constexpr std::false_type no;
  if constexpr (kNative == 16) {
    step(yes, no, begin);
    for (int64_t block = begin + 1; block < end; ++block) step(yes, yes, block);
    step(no, yes, end);
  } else {
    for (int64_t block = begin; block < end; ++block) {
      step(yes, no, block);
      step(no, yes, block + 1);
    }
  }
}

// Updates every block by rule R.
template <class R>
void update_all_blocks(const RuleUpdate& a, StreamView stream) {
  with_gradient_dtype("update", a.gradient_dtype, [&](auto gradient) {
    with_form<R>(a.form, [&](auto form) {
      constexpr int64_t kGrain = kGrainElements / kCodeBlock;
      parallel_for(stream.threads, a.elements / kCodeBlock, kGrain, [&](int64_t begin, int64_t end) {
        update_blocks<R, decltype(gradient), decltype(form)::value>(a, begin, end);
      });
    });
  });
}

}  // namespace
}  // namespace lm::LM_ISA
