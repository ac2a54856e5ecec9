// Frozen matrices from their codes on the GPU: a thread makes eight neighbours at a time, which share a
// scale. Compiled with -fmad=false: the CPU's bits.
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"
#include "kernels/encoding_tables.h"

namespace lm::gpu {
namespace {

constexpr int kEach = 8;   // elements of a thread at a time
constexpr int kTurns = 4;  // at most so many times, for which it asks at once

struct FourBits {
  const uint8_t* codes;
  const uint8_t* scale_codes;  // null: `scales` has the scales themselves
  const float* scales;
  ScaleBlocks blocks;
  int64_t elements;
  float value[16];
  float map[256];
};

// What makes eight elements, as it lies in memory.
struct Encoded {
  uint32_t codes = 0;  // the first is the upper half of the lowest byte
  float scale = 0;     // or, of a double scale, that of its group
  uint8_t scale_code = 0;
};

__device__ __forceinline__ Encoded load_encoded(const FourBits& a, int64_t first, bool words) {
  const int64_t block = block_of_matrix(a.blocks, first / kScaleBlock);
  const uint8_t* const codes = a.codes + (block * kScaleBlock + first % kScaleBlock) / 2;
  Encoded out;
  if (words) {
    out.codes = *reinterpret_cast<const uint32_t*>(codes);
  } else {
    const int64_t left = (a.elements - first + 1) / 2;
    for (int i = 0; i < kEach / 2 && i < left; ++i) out.codes |= static_cast<uint32_t>(codes[i]) << 8 * i;
  }
  if (a.scale_codes != nullptr) out.scale_code = a.scale_codes[block];
  out.scale = a.scales[a.scale_codes == nullptr ? block : 1 + block / kNestedBlock];
  return out;
}

// `words`: codes can be read four bytes at a time, and `out` written eight elements at a time; every thread
// then has all of its elements.
template <class T>
__global__ void four_bits(FourBits a, T* out, bool words) {
  __shared__ float value[16], map[256];
  const int64_t begin = (int64_t{blockIdx.x} * kTurns * kThreads + threadIdx.x) * kEach;
  Encoded from[kTurns];
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t first = begin + int64_t{turn} * kThreads * kEach;
    if (first < a.elements) from[turn] = load_encoded(a, first, words);
  }
  if (threadIdx.x < 16) value[threadIdx.x] = a.value[threadIdx.x];
  if (a.scale_codes != nullptr) map[threadIdx.x] = a.map[threadIdx.x];
  __syncthreads();
  for (int turn = 0; turn < kTurns; ++turn) {
    const int64_t first = begin + int64_t{turn} * kThreads * kEach;
    if (first >= a.elements) return;
    const float scale = a.scale_codes == nullptr
                            ? from[turn].scale
                            : map[from[turn].scale_code] * from[turn].scale + a.scales[0];
    float made[kEach];
    for (int i = 0; i < kEach; ++i) {
      const uint32_t byte = from[turn].codes >> (i / 2 * 8);
      made[i] = value[i % 2 == 0 ? byte >> 4 & 15 : byte & 15] * scale;
    }
    if (words) {
      store_rounded(out + first, made);
    } else {
      for (int i = 0; i < kEach && first + i < a.elements; ++i) out[first + i] = round_to<T>(made[i]);
    }
  }
}

// A block has a row's columns from blockIdx.y * kThreads * kEach on. `words`: as above, of eight codes.
template <class T>
__global__ void eight_bits(const int8_t* codes, const float* scales, int64_t columns, int64_t width, T* out,
                           bool words) {
  const int64_t row = blockIdx.x, first = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kEach;
  if (first >= columns) return;
  const float scale = scales[row];
  const int8_t* const from = codes + row * width + first;
  T* const to = out + row * columns + first;
  if (words) {
    const Pack<int8_t, kEach> code = load_pack<kEach>(from);
    float made[kEach];
    for (int i = 0; i < kEach; ++i) made[i] = static_cast<float>(code.at[i]) * scale * (1 / 127.0f);
    return store_rounded(to, made);
  }
  for (int i = 0; i < kEach && first + i < columns; ++i)
    to[i] = round_to<T>(static_cast<float>(from[i]) * scale * (1 / 127.0f));
}

struct Microscaled {
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t first, columns, width;  // as Materialise has them
  float twice[16];                // kMxTwice
};

// A block has a row's columns from blockIdx.y * kThreads * kEach on: of those that share a scale a thread has
// a part. `words`: as above, of eight codes.
template <class T>
__global__ void microscaled(Microscaled a, T* out, bool words) {
  __shared__ float twice[16];
  if (threadIdx.x < 16) twice[threadIdx.x] = a.twice[threadIdx.x];
  __syncthreads();
  const int64_t row = blockIdx.x, j = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kEach;
  if (j >= a.columns) return;
  const int64_t at = a.first + row * a.width + j;
  const float scale = mx_half_scale(a.scales[at / kMxBlock]);
  const uint8_t* const code = a.codes + at / 2;
  float made[kEach];
  for (int i = 0; i < kEach / 2; ++i) {
    made[2 * i] = twice[code[i] & 15] * scale;
    made[2 * i + 1] = twice[code[i] >> 4] * scale;
  }
  T* const to = out + row * a.columns + j;
  if (words) return store_rounded(to, made);
  for (int i = 0; i < kEach; ++i) to[i] = round_to<T>(made[i]);
}

template <class T>
void materialise_microscaled(const Materialise& m, StreamView stream) {
  LM_CHECK(m.first % kMxBlock == 0 && m.out.columns % kMxBlock == 0 && m.width() % kMxBlock == 0,
           "a tile cuts blocks of MXFP4");
  Microscaled a{reinterpret_cast<const uint8_t*>(m.pieces[0]),
                reinterpret_cast<const uint8_t*>(m.pieces[1]),
                m.first,
                m.out.columns,
                m.width(),
                {}};
  memcpy(a.twice, kMxTwice, sizeof a.twice);
  T* const out = static_cast<T*>(m.out.data);
  const dim3 grid(static_cast<unsigned>(m.out.rows), blocks_of(m.out.columns, kThreads * kEach));
  launch(microscaled<T>, grid, kThreads, stream, a, out, aligned(sizeof(T) * kEach, out));
}

}  // namespace

void materialise(const Materialise& m, StreamView stream) {
  with_dtype(m.out.dtype, [&](auto type) {
    using T = decltype(type);
    T* const out = static_cast<T*>(m.out.data);
    const int64_t elements = m.out.elements();
    if (elements == 0) return;
    if (m.kind == EncodingKind::kInt8) {
      const auto* const codes = reinterpret_cast<const int8_t*>(m.pieces[0]) + m.first;
      const bool words = m.out.columns % kEach == 0 && m.width() % kEach == 0 && aligned(kEach, codes) &&
                         aligned(sizeof(T) * kEach, out);
      const dim3 grid(static_cast<unsigned>(m.out.rows), blocks_of(m.out.columns, kThreads * kEach));
      return launch(eight_bits<T>, grid, kThreads, stream, codes,
                    reinterpret_cast<const float*>(m.pieces[1]) + m.first / m.width(), m.out.columns,
                    m.width(), out, words);
    }
    if (m.kind == EncodingKind::kMxfp4) return materialise_microscaled<T>(m, stream);
    LM_CHECK(is_four_bit(m.kind), "the elements of a plain encoding are used where they lie");
    LM_CHECK(ScaleBlocks::can(m), "a tile cuts blocks of 4-bit codes");
    const bool twice = has_double_scales(m.kind);
    FourBits a{reinterpret_cast<const uint8_t*>(m.pieces[0]),
               twice ? reinterpret_cast<const uint8_t*>(m.pieces[1]) : nullptr,
               reinterpret_cast<const float*>(m.pieces[twice ? 2 : 1]),
               ScaleBlocks(m),
               elements,
               {},
               {}};
    memcpy(a.value, four_bit_table(m.kind).value, sizeof a.value);
    memcpy(a.map, kDynamicMap, sizeof a.map);
    const bool words = elements % kEach == 0 && aligned(4, a.codes) && aligned(sizeof(T) * kEach, out);
    launch(four_bits<T>, blocks_of(elements, kThreads * kEach * kTurns), kThreads, stream, a, out, words);
  });
}

}  // namespace lm::gpu
