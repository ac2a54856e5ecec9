// A rule whose state is in codes, on the CPU: 256 elements are updated with their state in fp32 on the stack,
// then that is coded.
#include <bit>

#include "kernels/code_formula.h"
#include "kernels/code_lanes.h"
#include "kernels/turned_lanes.h"
#include "kernels/update_range.h"

namespace lm::LM_ISA {
namespace {

template <CodeMap map>
inline constexpr auto kTable = make_table<map>();

#if defined(__AVX512F__)
// Bytes in memory's order to that in which they part into four turned vectors, and back.
LM_INLINE __m512i turned_bytes(const uint8_t* from) {
  return _mm512_maskz_permutexvar_epi64(0xFF, _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7),
                                        _mm512_loadu_si512(from));
}
LM_INLINE void store_turned_bytes(uint8_t* to, __m512i a) {
  _mm512_storeu_si512(to, _mm512_maskz_permutexvar_epi64(0xFF, _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), a));
}

// Byte b of the value of each code: two permutations find 64 of them, one in each half of the codes.
struct ByteTable {
  alignas(64) uint8_t byte[4][256] = {};
};
template <CodeMap map>
constexpr ByteTable make_byte_table() {
  ByteTable out;
  for (size_t code = 0; code < 256; ++code) {
    const auto bits = std::bit_cast<uint32_t>(kTable<map>.value[code]);
    for (int b = 0; b < 4; ++b) out.byte[b][code] = static_cast<uint8_t>(bits >> (8 * b));
  }
  return out;
}
template <CodeMap map>
inline constexpr ByteTable kBytes = make_byte_table<map>();

LM_INLINE __m512i look_up_bytes(const uint8_t* entry, __m512i codes) {
  const auto of = [&](int first) LM_BODY {
    return _mm512_permutex2var_epi8(_mm512_load_si512(entry + first), codes,
                                    _mm512_load_si512(entry + first + 64));
  };
  return _mm512_mask_blend_epi8(_mm512_movepi8_mask(codes), of(0), of(128));
}
#endif

// The values of 64 codes from element i on, turned.
template <CodeMap map>
LM_INLINE Wide read_codes(const uint8_t* codes, int64_t i) {
  if constexpr (code_bits(map) == 4) {
    const F32 values = load(kTable<map>.value, Whole{});
    return turned(
        wide_of([&](int v) LM_BODY { return look_up(values, load_halves(codes + (i + v * kLanes) / 2)); }));
  } else {
#if defined(__AVX512F__)
    const __m512i of = turned_bytes(codes + i);
    __m512i byte[4];
    each_of<4>([&](auto b) LM_BODY { byte[b] = look_up_bytes(kBytes<map>.byte[b], of); });
    return parted({_mm512_unpacklo_epi8(byte[0], byte[1]), _mm512_unpackhi_epi8(byte[0], byte[1])},
                  {_mm512_unpacklo_epi8(byte[2], byte[3]), _mm512_unpackhi_epi8(byte[2], byte[3])});
#else
    return wide_of([&](int v)
                       LM_BODY { return look_up<256>(kTable<map>.value, load_u8(codes + i + v * kLanes)); });
#endif
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

// States until they are coded: as they are where the codes are joined from turned vectors, else in order.
template <CodeMap map>
constexpr bool kJoinsTurned = kNative == 16 && (map == CodeMap::kSigned8 || map == CodeMap::kUnsigned8);
template <CodeMap map>
LM_INLINE void keep_states(float* to, Wide states) {
  store(to, kJoinsTurned<map> ? states : in_order(states), Whole4{});
}

// The codes of 64 states from element i on.
template <CodeMap map>
LM_INLINE void code_states(const float* states, F32 factor, uint8_t* codes, int64_t i) {
  const auto& table = kTable<map>;
#if defined(__AVX512F__)
  if constexpr (kJoinsTurned<map>) {
    // nearest_code(), but for its last lines: joining 32-bit numbers to bytes clamps them.
    __m512i number[kWide];
    each_of<kWide>([&](auto v) LM_BODY {
      const F32 x = over_scale<map>(load(states + v * kLanes, Whole{}), factor);
      F32 of = code_number(table, map == CodeMap::kUnsigned8 ? x : magnitude(x));
      if constexpr (map == CodeMap::kSigned8) of = float_of(bits_of(of) | (bits_of(x) & U32(0x80000000)));
      number[v] = _mm512_maskz_cvtps_epi32(0xFFFF, (__m512)of.part[0]);
    });
    __m512i bytes;
    if constexpr (map == CodeMap::kSigned8) {
      // From -128 to 127 for codes from 0 to 255: 1 has no negative.
      const __m512i one = _mm512_set1_epi16(1);
      bytes = _mm512_packs_epi16(_mm512_sub_epi16(_mm512_packs_epi32(number[0], number[1]), one),
                                 _mm512_sub_epi16(_mm512_packs_epi32(number[2], number[3]), one));
      bytes = _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
    } else {
      bytes = _mm512_packus_epi16(_mm512_packus_epi32(number[0], number[1]),
                                  _mm512_packus_epi32(number[2], number[3]));
    }
    return store_turned_bytes(codes + i, bytes);
  }
#endif
  each_of<kWide>([&](auto v) LM_BODY {
    const F32 x = over_scale<map>(load(states + v * kLanes, Whole{}), factor);
    write_codes<map>(codes, i + v * kLanes, nearest_code<map>(table, x));
  });
}

// The largest magnitude in each lane, as bits, whose order is that of the numbers: infinity and NaN are above
// all of them.
LM_INLINE void keep_largest(U32& largest, F32 x) {
  const U32 bits = bits_of(magnitude(x));
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

// The largest magnitude of a block's states once those that are no numbers are 0.
template <int64_t n>
[[gnu::noinline]] float largest_of_numbers(float* values) {
  U32 largest(0);
  for (int64_t at = 0; at < n; at += kLanes) {
    const F32 x = coded_state(load(values + at, Whole{}));
    store(values + at, x, Whole{});
    keep_largest(largest, x);
  }
  return std::bit_cast<float>(largest_lane(largest));
}

// Of 64 weights from element i on, turned.
template <MasterForm form>
LM_INLINE Wide load_weights(const RuleUpdate& a, int64_t i) {
  const uint16_t* half = static_cast<const uint16_t*>(a.weight) + i;
  if constexpr (form == MasterForm::kWeight) return load_turned(static_cast<const float*>(a.weight) + i);
  if constexpr (form == MasterForm::kF32) return load_turned(static_cast<const float*>(a.master) + i);
  if constexpr (form == MasterForm::kStochastic) return load_turned(static_cast<const Bf16*>(a.weight) + i);
  return load_turned_split(half, static_cast<const uint16_t*>(a.master) + i);
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
  } else if constexpr (form == MasterForm::kStochastic) {
    const PhiloxWords<U32> numbers = rounding_numbers(a, i);
    const Wide random = turned(wide_of([&](int v) LM_BODY { return float_of(numbers.word[v]); }));
    store_turned_halves<false>(
        half, each([&](U32 bits, int v) LM_BODY { return stochastic_weight(bits, bits_of(random.of[v])); }));
  } else {
    store_turned_halves<true>(half, each([](U32 bits, int) LM_BODY { return split_rounded(bits); }));
    if constexpr (form == MasterForm::kF32) store_turned(static_cast<float*>(a.master) + i, p);
    if constexpr (form == MasterForm::kSplit)
      store_turned_halves<false>(static_cast<uint16_t*>(a.master) + i, bits_of(p));
  }
}

// one_nan() of what hardly ever is none.
LM_INLINE Wide one_nan(Wide a) {
#if defined(__AVX512F__)
  const auto nan = [&](int v) LM_BODY {
    return _mm512_cmp_ps_mask((__m512)a.of[v].part[0], (__m512)a.of[v + 1].part[0], _CMP_UNORD_Q);
  };
  if (__builtin_expect((nan(0) | nan(2)) == 0, 1)) return a;
#endif
  return wide_of([&](int v) LM_BODY { return one_nan(a.of[v]); });
}

// The lines of 64 elements.
template <class T>
LM_INLINE void prefetch_lines(const T* array, int64_t i) {
  each_of<sizeof(T)>([&](auto line) LM_BODY { prefetch(array, i + line * 64 / sizeof(T)); });
}
template <MasterForm form>
LM_INLINE void prefetch_weights(const RuleUpdate& a, int64_t i) {
  using Weight = std::conditional_t<form == MasterForm::kWeight, float, uint16_t>;
  prefetch_lines(static_cast<const Weight*>(a.weight), i);
  if constexpr (form == MasterForm::kF32) prefetch_lines(static_cast<const float*>(a.master), i);
  if constexpr (form == MasterForm::kSplit) prefetch_lines(static_cast<const uint16_t*>(a.master), i);
}

template <class R, class G, MasterForm form>
LM_INLINE void update_block(const RuleUpdate& a, const R& rule, int64_t first) {
  constexpr int kStates = kStateCount<R>;
  constexpr int64_t kBlock = code_block(R::kCodes[0]), kBlocks = kCodeBlock / kBlock;
  const int64_t block = first / kBlock;
  const G* gradient = static_cast<const G*>(a.gradient);
  const F32 gradient_scale(a.gradient_scale);
  float values[kStates][kCodeBlock];
  U32 largest[kStates][kBlocks];
  each_of<kStates>([&](auto s) LM_BODY {
    for (U32& of_block : largest[s]) of_block = U32(0);
  });
  for (int64_t begin = 0; begin < kCodeBlock; begin += kWide * kLanes) {
    const int64_t i = first + begin;
    prefetch_lines(gradient, i);
    prefetch_weights<form>(a, i);
    F32 scale[kStates];
    Wide states[kStates];
    each_of<kStates>([&](auto s) LM_BODY {
      scale[s] = F32(a.state[s][block + begin / kBlock]);
      states[s] = read_codes<R::kCodes[decltype(s)::value]>(a.codes[s], i);
    });
    const Wide g = load_turned(gradient + i);
    Wide p = load_weights<form>(a, i);
    each_of<kWide>([&](auto v) LM_BODY {
      F32 state[kStates];
      each_of<kStates>([&](auto s) LM_BODY { state[s] = states[s].of[v] * scale[s]; });
      R::update(rule, g.of[v] * gradient_scale, state, p.of[v]);
      each_of<kStates>([&](auto s) LM_BODY {
        keep_largest(largest[s][begin / kBlock], state[s]);
        states[s].of[v] = state[s];
      });
    });
    each_of<kStates>(
        [&](auto s) LM_BODY { keep_states<R::kCodes[decltype(s)::value]>(values[s] + begin, states[s]); });
    store_weights<form>(a, i, one_nan(p));
  }
  each_of<kStates>([&](auto s) LM_BODY {
    constexpr CodeMap map = R::kCodes[decltype(s)::value];
    static_assert(code_block(map) == kBlock);
    for (int64_t b = 0; b < kBlocks; ++b) {
      float top = std::bit_cast<float>(largest_lane(largest[s][b]));
      if (!(top < __builtin_inff())) top = largest_of_numbers<kBlock>(values[s] + b * kBlock);
      const F32 factor(code_factor<map>(top));
      a.state[s][block + b] = code_scale<map>(top);
      for (int64_t at = b * kBlock; at < (b + 1) * kBlock; at += kWide * kLanes)
        code_states<map>(values[s] + at, factor, a.codes[s], first + at);
    }
  });
}

// Copies, so that stores through state cannot change them.
template <class R, class G, MasterForm form>
void update_blocks(const RuleUpdate& args, int64_t begin, int64_t end) {
  const RuleUpdate a = args;
  const R rule = a.rule.as<R>();
  for (int64_t block = begin; block < end; ++block) update_block<R, G, form>(a, rule, block * kCodeBlock);
}

}  // namespace

void update_coded(const RuleUpdate& a, StreamView stream) {
  if (a.elements % kCodeBlock != 0) refuse_arguments("update", "coded elements are no multiple of 256");
  Rules::with(a.rule.id, [&](auto type) {
    using R = typename decltype(type)::type;
    if constexpr (kIsCoded<R>) {
      with_dtype("update", a.gradient_dtype, [&](auto gradient) {
        with_form(a.form, [&](auto form) {
          constexpr int64_t kGrain = kGrainElements / kCodeBlock;
          parallel_for(stream.threads, a.elements / kCodeBlock, kGrain, [&](int64_t begin, int64_t end) {
            update_blocks<R, decltype(gradient), decltype(form)::value>(a, begin, end);
          });
        });
      });
    } else {
      refuse_arguments("update", "codes of a rule that has none");
    }
  });
}

}  // namespace lm::LM_ISA
