// A rule whose state is in codes, on the CPU: 256 elements are updated with their state in fp32 on the stack,
// then that is coded.
#include <bit>

#include "kernels/code_formula.h"
#include "kernels/update_range.h"

namespace lm::LM_ISA {
namespace {

template <CodeMap map>
inline constexpr auto kTable = make_table<map>();

constexpr int kRead = 4;  // vectors of values at once
#if defined(__AVX512F__)
// Of the bytes of 4 vectors that are joined or parted in turns in every 128 bits: its own inverse.
LM_INLINE __m512i take_turns(__m512i bytes) {
  const __m512i turns = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_maskz_permutexvar_epi32(0xFFFF, turns, bytes);
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

// The values of 64 codes from element i on.
template <CodeMap map>
LM_INLINE void read_codes(const uint8_t* codes, int64_t i, F32 (&out)[kRead]) {
  if constexpr (code_bits(map) == 4) {
    const F32 values = load(kTable<map>.value, Whole{});
    each_of<kRead>([&](auto v)
                       LM_BODY { out[v] = look_up(values, load_halves(codes + (i + v * kLanes) / 2)); });
  } else {
#if defined(__AVX512F__)
    const __m512i of = take_turns(_mm512_loadu_si512(codes + i));
    __m512i byte[4];
    each_of<4>([&](auto b) LM_BODY { byte[b] = look_up_bytes(kBytes<map>.byte[b], of); });
    const __m512i low[2] = {_mm512_unpacklo_epi8(byte[0], byte[1]), _mm512_unpackhi_epi8(byte[0], byte[1])};
    const __m512i high[2] = {_mm512_unpacklo_epi8(byte[2], byte[3]), _mm512_unpackhi_epi8(byte[2], byte[3])};
    each_of<2>([&](auto half) LM_BODY {
      out[2 * half].part[0] = (NativeF32)_mm512_unpacklo_epi16(low[half], high[half]);
      out[2 * half + 1].part[0] = (NativeF32)_mm512_unpackhi_epi16(low[half], high[half]);
    });
#else
    each_of<kRead>(
        [&](auto v) LM_BODY { out[v] = look_up<256>(kTable<map>.value, load_u8(codes + i + v * kLanes)); });
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

// A map's table as the loop over a block wants it: with AVX-512 the lines of a dynamic map are in registers.
#if defined(__AVX512F__)
struct Octaves {
  F32 low, high;
};
LM_INLINE F32 of_octave(const Octaves& table, U32 octave) {
  F32 r;
  r.part[0] = (NativeF32)_mm512_permutex2var_ps((__m512)table.low.part[0], (__m512i)octave.part[0],
                                                (__m512)table.high.part[0]);
  return r;
}
struct LoadedTable {
  Octaves slope[CodeTable::kLines], offset[CodeTable::kLines];
  float one, last;
};
LM_INLINE LoadedTable loaded(const CodeTable& table) {
  LoadedTable out;
  const auto load_both = [](const float* of) LM_BODY -> Octaves {
    return {load(of, Whole{}), load(of + kLanes, Whole{})};
  };
  each_of<CodeTable::kLines>([&](auto l) LM_BODY {
    out.slope[l] = load_both(table.slope[l]);
    out.offset[l] = load_both(table.offset[l]);
  });
  out.one = table.one, out.last = table.last;
  return out;
}
#endif
template <class Table>
LM_INLINE const Table& loaded(const Table& table) {
  return table;
}

// The codes of a dynamic map of 64 elements from element i on, of their states.
template <CodeMap map, class Table>
LM_INLINE void code_four(const Table& table, const float* values, F32 factor, uint8_t* codes, int64_t i) {
#if defined(__AVX512F__)
  if constexpr (map == CodeMap::kSigned8 || map == CodeMap::kUnsigned8) {
    // nearest_code(), but for its last lines: joining 32-bit numbers to bytes clamps them.
    __m512i number[4];
    each_of<4>([&](auto v) LM_BODY {
      const F32 x = over_scale<map>(load(values + v * kLanes, Whole{}), factor);
      F32 of = code_number(table, magnitude(x));
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
    _mm512_storeu_si512(codes + i, take_turns(bytes));
    return;
  }
#endif
  each_of<4>([&](auto v) LM_BODY {
    const F32 x = over_scale<map>(load(values + v * kLanes, Whole{}), factor);
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
  for (int64_t begin = 0; begin < kCodeBlock; begin += kRead * kLanes) {
    PhiloxWords<U32> numbers{};
    if constexpr (form == MasterForm::kStochastic) numbers = rounding_numbers(a, first + begin);
    F32 scale[kStates], read[kStates][kRead];
    each_of<kStates>([&](auto s) LM_BODY {
      scale[s] = F32(a.state[s][block + begin / kBlock]);
      read_codes<R::kCodes[decltype(s)::value]>(a.codes[s], first + begin, read[s]);
    });
    each_of<kRead>([&](auto w) LM_BODY {
      const int64_t at = begin + w * kLanes, i = first + at;
      prefetch(gradient, i);
      prefetch_weight<form>(a, i);
      F32 state[kStates], p = load_weight<form>(a, i, Whole{});
      each_of<kStates>([&](auto s) LM_BODY { state[s] = read[s][w] * scale[s]; });
      R::update(rule, load(gradient + i, Whole{}) * gradient_scale, state, p);
      each_of<kStates>([&](auto s) LM_BODY {
        keep_largest(largest[s][begin / kBlock], state[s]);
        store(values[s] + at, state[s], Whole{});
      });
      store_weight<form>(a, i, one_nan(p), numbers.word[w], Whole{});
    });
  }
  each_of<kStates>([&](auto s) LM_BODY {
    constexpr CodeMap map = R::kCodes[decltype(s)::value];
    static_assert(code_block(map) == kBlock);
    const auto& table = loaded(kTable<map>);
    for (int64_t b = 0; b < kBlocks; ++b) {
      float top = std::bit_cast<float>(largest_lane(largest[s][b]));
      if (!(top < __builtin_inff())) top = largest_of_numbers<kBlock>(values[s] + b * kBlock);
      const F32 factor(code_factor<map>(top));
      a.state[s][block + b] = code_scale<map>(top);
      for (int64_t at = b * kBlock; at < (b + 1) * kBlock; at += 4 * kLanes)
        code_four<map>(table, values[s] + at, factor, a.codes[s], first + at);
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
