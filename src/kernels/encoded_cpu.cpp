// Frozen matrices from their codes, and codes from matrices. A block of 64 elements is four vectors, and
// nothing is added across lanes, so all instruction sets give the same bits.
#include "kernels/cpu_launchers.h"
#include "kernels/encoding_tables.h"

namespace lm::LM_ISA {
namespace {

constexpr int kVectors = kScaleBlock / kLanes;
constexpr float kLeast = 1e-38f;      // a smaller scale is taken for this one
constexpr float kLevel = 1 / 127.0f;  // of 8-bit codes

// Magnitudes.
LM_INLINE F32 absolute(F32 x) {
  return float_of(bits_of(x) & U32(0x7FFFFFFF));
}

// The scale of a block of 4-bit codes.
template <bool twice>
LM_INLINE float scale_of(const Materialise& m, int64_t block) {
  const auto* const floats = reinterpret_cast<const float*>(m.pieces[twice ? 2 : 1]);
  if constexpr (!twice) return floats[block];
  const auto* const codes = reinterpret_cast<const uint8_t*>(m.pieces[1]);
  return kDynamicMap[codes[block]] * floats[1 + block / kNestedBlock] + floats[0];
}

template <class T, bool twice>
void four_bits(const Materialise& m, const ScaleBlocks& blocks, int64_t first_block, int64_t end_block) {
  F32 table;
  memcpy(&table, four_bit_table(m.kind).value, sizeof table);
  const auto* const codes = reinterpret_cast<const uint8_t*>(m.pieces[0]);
  T* const out = static_cast<T*>(m.out.data);
  const int64_t elements = m.out.elements();
  for (int64_t block = first_block; block < end_block; ++block) {
    const int64_t of = block_of_matrix(blocks, block), begin = block * kScaleBlock;
    const F32 scale(scale_of<twice>(m, of));
    const uint8_t* const code = codes + of * (kScaleBlock / 2) - begin / 2;  // of the element that is out[0]
    if (begin + kScaleBlock <= elements) {
      LM_UNROLL for (int v = 0; v < kVectors; ++v) {
        const int64_t i = begin + v * kLanes;
        store(out + i, look_up(table, load_halves(code + i / 2)) * scale, Whole{});
      }
      continue;
    }
    for (int64_t i = begin; i < elements; i += kLanes) {
      const int64_t left = elements - i < kLanes ? elements - i : kLanes;
      uint8_t bytes[kLanes / 2] = {};
      memcpy(bytes, code + i / 2, static_cast<size_t>((left + 1) / 2));
      const F32 values = look_up(table, load_halves(bytes)) * scale;
      left == kLanes ? store(out + i, values, Whole{}) : store(out + i, values, Part{static_cast<int>(left)});
    }
  }
}

template <class T>
void eight_bits(const Materialise& m, int64_t first_row, int64_t end_row) {
  const auto* const scales = reinterpret_cast<const float*>(m.pieces[1]);
  const int64_t columns = m.out.columns;
  for (int64_t row = first_row; row < end_row; ++row) {
    const auto* const codes = reinterpret_cast<const int8_t*>(m.pieces[0]) + m.first + row * m.width();
    T* const out = static_cast<T*>(m.out.data) + row * columns;
    const F32 scale(scales[m.first / m.width() + row]), level(kLevel);
    each_vector(columns, [&](int64_t j, auto count) LM_BODY {
      int8_t code[kLanes] = {};
      float value[kLanes];
      const int64_t left = columns - j < kLanes ? columns - j : kLanes;
      memcpy(code, codes + j, static_cast<size_t>(left));
      for (int l = 0; l < kLanes; ++l) value[l] = static_cast<float>(code[l]);
      store(out + j, load(value, Whole{}) * scale * level, count);
    });
  }
}

template <class T>
void microscaled(const Materialise& m, int64_t first_row, int64_t end_row) {
  const auto* const codes = reinterpret_cast<const uint8_t*>(m.pieces[0]);
  const auto* const scales = reinterpret_cast<const uint8_t*>(m.pieces[1]);
  const int64_t columns = m.out.columns;
  for (int64_t row = first_row; row < end_row; ++row) {
    T* const out = static_cast<T*>(m.out.data) + row * columns;
    for (int64_t j = 0; j < columns; j += kMxBlock) {
      const int64_t at = m.first + row * m.width() + j;
      const uint8_t* const code = codes + at / 2;
      float value[kMxBlock];
      for (int64_t i = 0; i < kMxBlock / 2; ++i) {
        value[2 * i] = kMxTwice[code[i] & 15];
        value[2 * i + 1] = kMxTwice[code[i] >> 4];
      }
      const F32 scale(mx_half_scale(scales[at / kMxBlock]));
      each_vector(kMxBlock, [&](int64_t i, auto count)
                                LM_BODY { store(out + j + i, load(value + i, count) * scale, count); });
    }
  }
}

// Of a vector that was divided by its scale, code after code into 8 bytes.
template <bool reordered>
LM_INLINE void store_codes(F32 x, const FourBitTable& table, uint8_t* to, int bytes) {
  F32 above(0.f);
  for (const float threshold : table.threshold)
    above = above + select_less(F32(threshold), x, F32(1.f), F32(0.f));
  const U32 places = bits_of(above + F32(8388608.f));  // 2^23: the number is in the low bits
  uint32_t place[kLanes];
  memcpy(place, places.part, sizeof place);
  uint8_t packed[kLanes / 2];
  for (int i = 0; i < kLanes / 2; ++i) {
    const uint32_t high = place[2 * i] & 15, low = place[2 * i + 1] & 15;
    packed[i] = static_cast<uint8_t>(reordered ? table.order[high] << 4 | table.order[low] : high << 4 | low);
  }
  memcpy(to, packed, static_cast<size_t>(bytes));
}

template <class T, bool reordered>
void quantize_four_bits(const QuantizeMatrix& q, int64_t begin, int64_t end) {
  const FourBitTable table = four_bit_table(q.kind);
  for (int64_t first = begin; first < end; first += kScaleBlock) {
    const auto n = static_cast<int>(end - first < kScaleBlock ? end - first : kScaleBlock);
    F32 x[kVectors], most(0.f);
    for (int v = 0; v < kVectors; ++v) {
      const T* const from = static_cast<const T*>(q.x) + first + v * kLanes;
      const int left = n - v * kLanes;
      x[v] = left >= kLanes ? load(from, Whole{}) : left > 0 ? load(from, Part{left}) : F32(0.f);
      most = max(absolute(x[v]), most);
    }
    const float largest = max_lanes(most), scale = largest < kLeast ? kLeast : largest;
    const bool whole = n == kScaleBlock;
    q.scales[first / kScaleBlock] = whole ? largest : scale;
    for (int v = 0; v * kLanes < n; ++v) {
      const int left = n - v * kLanes < kLanes ? n - v * kLanes : kLanes;
      store_codes<reordered>(whole ? x[v] * F32(1 / scale) : x[v] / F32(scale), table,
                             q.codes + first / 2 + v * kLanes / 2, (left + 1) / 2);
    }
  }
}

template <class T>
void quantize_eight_bits(const QuantizeMatrix& q, int64_t first_row, int64_t end_row) {
  for (int64_t row = first_row; row < end_row; ++row) {
    const T* const x = static_cast<const T*>(q.x) + row * q.columns;
    uint8_t* const codes = q.codes + row * q.columns;
    F32 most(0.f);
    each_vector(q.columns,
                [&](int64_t j, auto count) LM_BODY { most = max(absolute(load(x + j, count)), most); });
    const float largest = max_lanes(most);
    q.scales[row] = largest;
    const F32 factor(largest > 0 ? 1 / largest * 127 : 0.f);
    each_vector(q.columns, [&](int64_t j, auto count) LM_BODY {
      // 1.5 * 2^23: adding it rounds to an integer, to even, in the low bits.
      const U32 bits = bits_of(load(x + j, count) * factor + F32(12582912.f));
      uint32_t lane[kLanes];
      memcpy(lane, bits.part, sizeof lane);
      const int64_t left = q.columns - j < kLanes ? q.columns - j : kLanes;
      for (int64_t l = 0; l < left; ++l) codes[j + l] = static_cast<uint8_t>(lane[l]);
    });
  }
}

}  // namespace

void materialise(const Materialise& m, StreamView stream) {
  with_dtype("materialise", m.out.dtype, [&](auto type) {
    using T = decltype(type);
    if (m.kind == EncodingKind::kInt8) {
      return parallel_for(stream.threads, m.out.rows, row_grain(m.out.columns),
                          [&](int64_t begin, int64_t end) { eight_bits<T>(m, begin, end); });
    }
    if (m.kind == EncodingKind::kMxfp4) {
      const bool blocks =
          m.first % kMxBlock == 0 && m.out.columns % kMxBlock == 0 && m.width() % kMxBlock == 0;
      if (!blocks) refuse_arguments("materialise", "a tile cuts blocks of MXFP4");
      return parallel_for(stream.threads, m.out.rows, row_grain(m.out.columns),
                          [&](int64_t begin, int64_t end) { microscaled<T>(m, begin, end); });
    }
    if (!is_four_bit(m.kind)) refuse_arguments("materialise", "the elements are used where they lie");
    if (!ScaleBlocks::can(m)) refuse_arguments("materialise", "a tile cuts blocks of 4-bit codes");
    const ScaleBlocks blocks(m);
    const bool twice = has_double_scales(m.kind);
    parallel_for(stream.threads, (m.out.elements() + kScaleBlock - 1) / kScaleBlock,
                 kGrainElements / kScaleBlock, [&](int64_t begin, int64_t end) {
                   twice ? four_bits<T, true>(m, blocks, begin, end)
                         : four_bits<T, false>(m, blocks, begin, end);
                 });
  });
}

void quantize(const QuantizeMatrix& q, StreamView stream) {
  with_dtype("quantize", q.dtype, [&](auto type) {
    using T = decltype(type);
    if (q.kind == EncodingKind::kInt8) {
      return parallel_for(stream.threads, q.elements / q.columns, row_grain(q.columns),
                          [&](int64_t begin, int64_t end) { quantize_eight_bits<T>(q, begin, end); });
    }
    if (!is_four_bit(q.kind)) refuse_arguments("quantize", "no codes of a plain encoding");
    parallel_elements(stream.threads, q.elements, [&](int64_t begin, int64_t end) {
      is_fp4(q.kind) ? quantize_four_bits<T, true>(q, begin, end)
                     : quantize_four_bits<T, false>(q, begin, end);
    });
  });
}

}  // namespace lm::LM_ISA
