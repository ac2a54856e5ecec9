// AdamW on the GPU: one pass, four elements per thread and turn. Compiled with -fmad=false: the CPU's bits.
#include "kernels/adamw_formula.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"

namespace lm::gpu {
namespace {

using Master = AdamW::Master;

// n weights of a mode, as fp32 numbers.
template <Master mode, int n>
__device__ __forceinline__ Pack<float, n> load_weights(const AdamW& a, int64_t i) {
  if constexpr (mode == Master::kWeight) return load_pack<n>(static_cast<const float*>(a.weight) + i);
  if constexpr (mode == Master::kF32) return load_pack<n>(static_cast<const float*>(a.master) + i);
  Pack<float, n> p{};
  const Pack<uint16_t, n> high = load_pack<n>(static_cast<const uint16_t*>(a.weight) + i);
  if constexpr (mode == Master::kStochastic) {
    for (int k = 0; k < n; ++k) p.at[k] = to_float(Bf16{high.at[k]});
  }
  if constexpr (mode == Master::kSplit) {
    const Pack<uint16_t, n> low = load_pack<n>(static_cast<const uint16_t*>(a.master) + i);
    for (int k = 0; k < n; ++k) p.at[k] = float_of(split_join<uint32_t>(high.at[k], low.at[k]));
  }
  return p;
}

template <Master mode, int n>
__device__ __forceinline__ void store_weights(const AdamW& a, int64_t i, const Pack<float, n>& p) {
  if constexpr (mode == Master::kWeight) {
    store_pack<n>(static_cast<float*>(a.weight) + i, p);
  } else {
    Pack<uint16_t, n> high, low;
    for (int k = 0; k < n; ++k) {
      const uint32_t bits = bits_of(p.at[k]);
      if constexpr (mode == Master::kStochastic) {
        const uint64_t index = static_cast<uint64_t>(a.first_index + i + k);
        high.at[k] = static_cast<uint16_t>(stochastic_weight(bits, philox_at(a.rounding_key, index, 0, 0)));
      } else {
        high.at[k] = static_cast<uint16_t>(split_weight(bits));
      }
      low.at[k] = static_cast<uint16_t>(split_low(bits));
    }
    store_pack<n>(static_cast<uint16_t*>(a.weight) + i, high);
    if constexpr (mode == Master::kF32) store_pack<n>(static_cast<float*>(a.master) + i, p);
    if constexpr (mode == Master::kSplit) store_pack<n>(static_cast<uint16_t*>(a.master) + i, low);
  }
}

template <class G, Master mode, int n>
__global__ void update(AdamW a, AdamWConstants<float> constants) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * n;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * n; i < a.elements;
       i += step) {
    const Pack<G, n> gradient = load_pack<n>(static_cast<const G*>(a.gradient) + i);
    Pack<float, n> m = load_pack<n>(a.m + i), v = load_pack<n>(a.v + i), p = load_weights<mode, n>(a, i);
    for (int k = 0; k < n; ++k) adamw_update(constants, to_float(gradient.at[k]), m.at[k], v.at[k], p.at[k]);
    store_pack<n>(a.m + i, m);
    store_pack<n>(a.v + i, v);
    store_weights<mode, n>(a, i, p);
  }
}

template <class G, Master mode>
void update_as(const AdamW& a, StreamView stream) {
  const AdamWConstants<float> constants = adamw_constants<float>(a);
  const bool pack = a.elements % 4 == 0 && aligned(16, a.m, a.v) && aligned(4 * sizeof(G), a.gradient) &&
                    aligned(mode == Master::kWeight ? 16 : 8, a.weight) &&
                    aligned(mode == Master::kF32 ? 16 : 8, a.master);
  if (pack) return launch(update<G, mode, 4>, stride_blocks(a.elements / 4), kThreads, stream, a, constants);
  launch(update<G, mode, 1>, stride_blocks(a.elements), kThreads, stream, a, constants);
}

}  // namespace

void adamw(const AdamW& a, StreamView stream) {
  LM_CHECK(a.weight_dtype == (a.mode == Master::kWeight ? DType::kF32 : DType::kBF16), "adamw: weight type");
  LM_CHECK(a.first_index % 64 == 0, "adamw: first_index");
  with_dtype(a.gradient_dtype, [&](auto t) {
    using G = decltype(t);
    switch (a.mode) {
      case Master::kWeight:
        return update_as<G, Master::kWeight>(a, stream);
      case Master::kSplit:
        return update_as<G, Master::kSplit>(a, stream);
      case Master::kF32:
        return update_as<G, Master::kF32>(a, stream);
      case Master::kStochastic:
        return update_as<G, Master::kStochastic>(a, stream);
    }
  });
}

}  // namespace lm::gpu
