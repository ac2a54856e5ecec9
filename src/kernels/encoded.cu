// Frozen matrices from their codes on the GPU: a thread makes eight elements of 4-bit codes, which share a
// scale, or one of 8-bit codes. Compiled with -fmad=false: the CPU's bits.
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"
#include "kernels/encoding_tables.h"

namespace lm::gpu {
namespace {

constexpr int kEach = 8;  // elements of a thread

struct FourBits {
  const uint8_t* codes;
  const uint8_t* scale_codes;  // null: `scales` has the scales themselves
  const float* scales;
  ScaleBlocks blocks;
  int64_t elements;
  float value[16];
  float map[256];
};

template <class T>
__global__ void four_bits(FourBits a, T* out, bool packs) {
  __shared__ float value[16], map[256];
  if (threadIdx.x < 16) value[threadIdx.x] = a.value[threadIdx.x];
  if (threadIdx.x < 256) map[threadIdx.x] = a.map[threadIdx.x];
  __syncthreads();
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t t = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; t * kEach < a.elements;
       t += step) {
    const int64_t first = t * kEach, block = block_of_matrix(a.blocks, first / kScaleBlock);
    const int64_t of = block * kScaleBlock + first % kScaleBlock;
    float scale;
    if (a.scale_codes == nullptr) {
      scale = a.scales[block];
    } else {
      scale = map[a.scale_codes[block]] * a.scales[1 + block / kNestedBlock] + a.scales[0];
    }
    const int n = a.elements - first < kEach ? static_cast<int>(a.elements - first) : kEach;
    Pack<T, kEach> made;
    for (int i = 0; i < n; ++i) {
      const uint8_t byte = a.codes[(of + i) / 2];
      made.at[i] = round_to<T>(value[i % 2 == 0 ? byte >> 4 : byte & 15] * scale);
    }
    if (packs && n == kEach) {
      store_pack(out + first, made);
    } else {
      for (int i = 0; i < n; ++i) out[first + i] = made.at[i];
    }
  }
}

template <class T>
__global__ void eight_bits(const int8_t* codes, const float* scales, int64_t elements, int64_t columns,
                           int64_t width, T* out) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elements; i += step)
    out[i] = round_to<T>(static_cast<float>(codes[i / columns * width + i % columns]) * scales[i / columns] *
                         (1 / 127.0f));
}

}  // namespace

void materialise(const Materialise& m, StreamView stream) {
  with_dtype(m.out.dtype, [&](auto type) {
    using T = decltype(type);
    T* const out = static_cast<T*>(m.out.data);
    const int64_t elements = m.out.elements();
    if (m.kind == EncodingKind::kInt8) {
      return launch(eight_bits<T>, stride_blocks(elements), kThreads, stream,
                    reinterpret_cast<const int8_t*>(m.pieces[0]) + m.first,
                    reinterpret_cast<const float*>(m.pieces[1]) + m.first / m.width(), elements,
                    m.out.columns, m.width(), out);
    }
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
    launch(four_bits<T>, stride_blocks((elements + kEach - 1) / kEach), kThreads, stream, a, out,
           aligned(sizeof(Pack<T, kEach>), out));
  });
}

}  // namespace lm::gpu
