// The forms of a weight in the GPU's updates. For .cu files alone.
#pragma once

#include <type_traits>

#include "base/philox.h"
#include "kernels/cuda_common.cuh"
#include "kernels/master_formula.h"

namespace lm::gpu {

// The step is skipped: the update ends without a change.
__device__ __forceinline__ bool skipped(const RuleUpdate& a) {
  return a.decision != nullptr && a.decision->skipped != 0;
}
__device__ __forceinline__ float gradient_scale(const RuleUpdate& a) {
  return a.decision != nullptr ? a.decision->scale : a.gradient_scale;
}

// n weights of a form, as fp32 numbers.
template <MasterForm form, int n>
__device__ __forceinline__ Pack<float, n> load_weights(const RuleUpdate& a, int64_t i) {
  if constexpr (form == MasterForm::kWeight) return load_pack<n>(static_cast<const float*>(a.weight) + i);
  if constexpr (kHasFp32Master<form>) return load_pack<n>(static_cast<const float*>(a.master) + i);
  Pack<float, n> p{};
  const Pack<uint16_t, n> high = load_pack<n>(static_cast<const uint16_t*>(a.weight) + i);
  if constexpr (form == MasterForm::kStochastic || form == MasterForm::kNearest) {
    for (int k = 0; k < n; ++k) p.at[k] = to_float(Bf16{high.at[k]});
  }
  if constexpr (form == MasterForm::kStochasticFp16) {
    for (int k = 0; k < n; ++k) p.at[k] = to_float(Fp16{high.at[k]});
  }
  if constexpr (form == MasterForm::kSplit) {
    const Pack<uint16_t, n> low = load_pack<n>(static_cast<const uint16_t*>(a.master) + i);
    for (int k = 0; k < n; ++k) p.at[k] = float_of(split_join<uint32_t>(high.at[k], low.at[k]));
  }
  return p;
}

template <MasterForm form, int n>
__device__ __forceinline__ void store_weights(const RuleUpdate& a, int64_t i, const Pack<float, n>& p) {
  if constexpr (form == MasterForm::kWeight) {
    store_pack<n>(static_cast<float*>(a.weight) + i, p);
  } else {
    Pack<uint16_t, n> high, low;
    for (int k = 0; k < n; ++k) {
      const uint32_t bits = bits_of(p.at[k]);
      const uint64_t index = static_cast<uint64_t>(a.first_index + i + k);
      if constexpr (form == MasterForm::kStochasticFp16) {
        high.at[k] = to_fp16(stochastic_fp16(p.at[k], philox_at(a.rounding_key, index, 0, 0))).bits;
      } else if constexpr (form == MasterForm::kF32OfFp16) {
        high.at[k] = to_fp16(p.at[k]).bits;
      } else if constexpr (form == MasterForm::kStochastic) {
        high.at[k] = static_cast<uint16_t>(stochastic_weight(bits, philox_at(a.rounding_key, index, 0, 0)));
      } else if constexpr (form == MasterForm::kNearest) {
        high.at[k] = to_bf16(p.at[k]).bits;
      } else {
        high.at[k] = static_cast<uint16_t>(split_weight(bits));
      }
      low.at[k] = static_cast<uint16_t>(split_low(bits));
    }
    store_pack<n>(static_cast<uint16_t*>(a.weight) + i, high);
    if constexpr (kHasFp32Master<form>) store_pack<n>(static_cast<float*>(a.master) + i, p);
    if constexpr (form == MasterForm::kSplit) store_pack<n>(static_cast<uint16_t*>(a.master) + i, low);
  }
}

// A rule whose state is in codes.
void update_coded(const RuleUpdate& args, StreamView stream);
// A rule whose state is statistics of rows and columns.
void update_factored(const RuleUpdate& args, StreamView stream);
// A matrix that steps by its orthogonal momentum.
void update_muon(const RuleUpdate& args, StreamView stream);

}  // namespace lm::gpu
