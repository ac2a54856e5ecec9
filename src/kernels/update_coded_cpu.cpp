// A rule whose state is in codes, on the CPU: 256 elements are updated with their state in fp32 on the stack,
// then that is coded.
#include <bit>

#include "kernels/code_formula.h"
#include "kernels/update_range.h"

namespace lm::LM_ISA {
namespace {

template <CodeMap map>
inline constexpr auto kTable = make_table<map>();

// The values of a map's codes in halves of 16 bits: a permutation finds them among twice as many.
struct HalfTable {
  uint16_t low[256] = {}, high[256] = {};
};
template <CodeMap map>
constexpr HalfTable make_half_table() {
  HalfTable out;
  for (size_t code = 0; code < 256; ++code) {
    const auto bits = std::bit_cast<uint32_t>(kTable<map>.value[code]);
    out.low[code] = static_cast<uint16_t>(bits);
    out.high[code] = static_cast<uint16_t>(bits >> 16);
  }
  return out;
}

constexpr int kRead = 4;  // vectors of values at once
#if defined(__AVX512F__)
template <CodeMap map>
inline constexpr HalfTable kHalves = make_half_table<map>();

// entry[i] of each of the 32 numbers below 256.
LM_INLINE __m512i look_up_halves(const uint16_t* entry, __m512i i) {
  const auto of = [&](int first) LM_BODY {
    return _mm512_permutex2var_epi16(_mm512_loadu_si512(entry + first), i,
                                     _mm512_loadu_si512(entry + first + 32));
  };
  const __mmask32 bit6 = _mm512_test_epi16_mask(i, _mm512_set1_epi16(64));
  const __mmask32 bit7 = _mm512_test_epi16_mask(i, _mm512_set1_epi16(128));
  const __m512i low = _mm512_mask_blend_epi16(bit6, of(0), of(64));
  const __m512i high = _mm512_mask_blend_epi16(bit6, of(128), of(192));
  return _mm512_mask_blend_epi16(bit7, low, high);
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
    // Joining the halves takes turns in every 128 bits, so that is the order of the codes.
    const __m512i turns = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    each_of<2>([&](auto half) LM_BODY {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i + 32 * half));
      const __m512i number = _mm512_maskz_permutexvar_epi64(0xFF, turns, _mm512_cvtepu8_epi16(bytes));
      const __m512i low = look_up_halves(kHalves<map>.low, number),
                    high = look_up_halves(kHalves<map>.high, number);
      out[2 * half].part[0] = (NativeF32)_mm512_unpacklo_epi16(low, high);
      out[2 * half + 1].part[0] = (NativeF32)_mm512_unpackhi_epi16(low, high);
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

// The largest lane, of numbers, without going through memory.
LM_INLINE float largest_lane(F32 a) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m512 all = (__m512)a.part[0];
  const __m256 eight =
      _mm256_max_ps(_mm512_maskz_extractf32x8_ps(0xFF, all, 0), _mm512_maskz_extractf32x8_ps(0xFF, all, 1));
#else
  const __m256 eight = _mm256_max_ps((__m256)a.part[0], (__m256)a.part[1]);
#endif
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(four, _mm_shuffle_ps(four, four, 1)));
#else
  return max_lanes(a);
#endif
}

template <class R, class G, MasterForm form>
LM_INLINE void update_block(const RuleUpdate& a, const R& rule, int64_t first) {
  constexpr int kStates = kStateCount<R>;
  constexpr int64_t kBlock = code_block(R::kCodes[0]), kBlocks = kCodeBlock / kBlock;
  const int64_t block = first / kBlock;
  const G* gradient = static_cast<const G*>(a.gradient);
  const F32 gradient_scale(a.gradient_scale);
  float values[kStates][kCodeBlock];
  F32 largest[kStates][kBlocks];
  each_of<kStates>([&](auto s) LM_BODY {
    for (F32& of_block : largest[s]) of_block = F32(0.f);
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
        state[s] = coded_state(state[s]);
        largest[s][begin / kBlock] = max(largest[s][begin / kBlock], magnitude(state[s]));
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
      const float top = largest_lane(largest[s][b]);
      const F32 factor(code_factor<map>(top));
      a.state[s][block + b] = code_scale<map>(top);
      for (int64_t at = b * kBlock; at < (b + 1) * kBlock; at += kLanes) {
        const F32 x = over_scale<map>(load(values[s] + at, Whole{}), factor);
        write_codes<map>(a.codes[s], first + at, nearest_code<map>(table, x));
      }
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
