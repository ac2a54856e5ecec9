// An optimizer's rule on the GPU: one pass, four elements per thread and turn. Compiled with -fmad=false: the
// CPU's bits.
#include "base/philox.h"
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_launchers.h"
#include "kernels/master_formula.h"

namespace lm::gpu {
namespace {

// n weights of a form, as fp32 numbers.
template <MasterForm form, int n>
__device__ __forceinline__ Pack<float, n> load_weights(const RuleUpdate& a, int64_t i) {
  if constexpr (form == MasterForm::kWeight) return load_pack<n>(static_cast<const float*>(a.weight) + i);
  if constexpr (form == MasterForm::kF32) return load_pack<n>(static_cast<const float*>(a.master) + i);
  Pack<float, n> p{};
  const Pack<uint16_t, n> high = load_pack<n>(static_cast<const uint16_t*>(a.weight) + i);
  if constexpr (form == MasterForm::kStochastic) {
    for (int k = 0; k < n; ++k) p.at[k] = to_float(Bf16{high.at[k]});
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
      if constexpr (form == MasterForm::kStochastic) {
        const uint64_t index = static_cast<uint64_t>(a.first_index + i + k);
        high.at[k] = static_cast<uint16_t>(stochastic_weight(bits, philox_at(a.rounding_key, index, 0, 0)));
      } else {
        high.at[k] = static_cast<uint16_t>(split_weight(bits));
      }
      low.at[k] = static_cast<uint16_t>(split_low(bits));
    }
    store_pack<n>(static_cast<uint16_t*>(a.weight) + i, high);
    if constexpr (form == MasterForm::kF32) store_pack<n>(static_cast<float*>(a.master) + i, p);
    if constexpr (form == MasterForm::kSplit) store_pack<n>(static_cast<uint16_t*>(a.master) + i, low);
  }
}

template <class R, class G, MasterForm form, int n>
__global__ void update(RuleUpdate a, R rule) {
  constexpr int kStreams = kStreamCount<R>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * n;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * n; i < a.elements;
       i += step) {
    const Pack<G, n> gradient = load_pack<n>(static_cast<const G*>(a.gradient) + i);
    Pack<float, n> state[kStreams], p = load_weights<form, n>(a, i);
    for (int s = 0; s < kStreams; ++s) state[s] = load_pack<n>(a.state[s] + i);
    for (int k = 0; k < n; ++k) {
      float of_element[kStreams];
      for (int s = 0; s < kStreams; ++s) of_element[s] = state[s].at[k];
      R::update(rule, to_float(gradient.at[k]) * a.gradient_scale, of_element, p.at[k]);
      for (int s = 0; s < kStreams; ++s) state[s].at[k] = one_nan(of_element[s]);
      p.at[k] = one_nan(p.at[k]);
    }
    for (int s = 0; s < kStreams; ++s) store_pack<n>(a.state[s] + i, state[s]);
    store_weights<form, n>(a, i, p);
  }
}

template <class R, class G, MasterForm form>
void update_as(const RuleUpdate& a, StreamView stream) {
  bool pack = a.elements % 4 == 0 && aligned(4 * sizeof(G), a.gradient) &&
              aligned(form == MasterForm::kWeight ? 16 : 8, a.weight) &&
              aligned(form == MasterForm::kF32 ? 16 : 8, a.master);
  for (int s = 0; s < kStreamCount<R>; ++s) pack = pack && aligned(16, a.state[s]);
  const R rule = a.rule.as<R>();
  if (pack) return launch(update<R, G, form, 4>, stride_blocks(a.elements / 4), kThreads, stream, a, rule);
  launch(update<R, G, form, 1>, stride_blocks(a.elements), kThreads, stream, a, rule);
}

template <class R, class G>
void update_as(const RuleUpdate& a, StreamView stream) {
  switch (a.form) {
    case MasterForm::kWeight:
      return update_as<R, G, MasterForm::kWeight>(a, stream);
    case MasterForm::kSplit:
      return update_as<R, G, MasterForm::kSplit>(a, stream);
    case MasterForm::kF32:
      return update_as<R, G, MasterForm::kF32>(a, stream);
    case MasterForm::kStochastic:
      return update_as<R, G, MasterForm::kStochastic>(a, stream);
  }
}

}  // namespace

void update(const RuleUpdate& a, StreamView stream) {
  LM_CHECK(a.weight_dtype == (a.form == MasterForm::kWeight ? DType::kF32 : DType::kBF16),
           "update: weight type");
  LM_CHECK(a.first_index % 64 == 0, "update: first_index");
  Rules::with(a.rule.id, [&](auto rule) {
    with_dtype(a.gradient_dtype, [&](auto gradient) {
      update_as<typename decltype(rule)::type, decltype(gradient)>(a, stream);
    });
  });
}

}  // namespace lm::gpu
