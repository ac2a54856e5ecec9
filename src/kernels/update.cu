// An optimizer's rule on the GPU: one pass, four elements per thread and turn. Compiled with -fmad=false: the
// CPU's bits.
#include "kernels/cuda_launchers.h"
#include "kernels/update_weights.cuh"

namespace lm::gpu {
namespace {

template <class R, class G, MasterForm form, int n>
__global__ void update(RuleUpdate a, R rule) {
  constexpr int kStates = kStateCount<R>;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * n;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * n; i < a.elements;
       i += step) {
    const Pack<G, n> gradient = load_pack<n>(static_cast<const G*>(a.gradient) + i);
    Pack<float, n> state[kStates], p = load_weights<form, n>(a, i);
    for (int s = 0; s < kStates; ++s) state[s] = load_pack<n>(a.state[s] + i);
    for (int k = 0; k < n; ++k) {
      float of_element[kStates];
      for (int s = 0; s < kStates; ++s) of_element[s] = state[s].at[k];
      R::update(rule, to_float(gradient.at[k]) * a.gradient_scale, of_element, p.at[k]);
      for (int s = 0; s < kStates; ++s) state[s].at[k] = one_nan(of_element[s]);
      p.at[k] = one_nan(p.at[k]);
    }
    for (int s = 0; s < kStates; ++s) store_pack<n>(a.state[s] + i, state[s]);
    store_weights<form, n>(a, i, p);
  }
}

template <class R, class G, MasterForm form>
void update_as(const RuleUpdate& a, StreamView stream) {
  bool pack = a.elements % 4 == 0 && aligned(4 * sizeof(G), a.gradient) &&
              aligned(form == MasterForm::kWeight ? 16 : 8, a.weight) &&
              aligned(form == MasterForm::kF32 ? 16 : 8, a.master);
  for (int s = 0; s < kStateCount<R>; ++s) pack = pack && aligned(16, a.state[s]);
  const R rule = a.rule.as<R>();
  if (pack) return launch(update<R, G, form, 4>, stride_blocks(a.elements / 4), kThreads, stream, a, rule);
  launch(update<R, G, form, 1>, stride_blocks(a.elements), kThreads, stream, a, rule);
}

}  // namespace

void update(const RuleUpdate& a, StreamView stream) {
  LM_CHECK(a.weight_dtype == (a.form == MasterForm::kWeight ? DType::kF32 : DType::kBF16),
           "update: weight type");
  if (is_factored(a.rule.id)) return update_factored(a, stream);
  if (a.orthogonal.call != OrthogonalState::Call::kNone) return update_orthogonal(a, stream);
  LM_CHECK(a.first_index % 64 == 0, "update: first_index");
  if (a.codes[0] != nullptr) return update_coded(a, stream);
  Rules::with(a.rule.id, [&](auto type) {
    using R = RuleFormula<typename decltype(type)::type>;
    if constexpr (!kIsFactored<R>) {
      with_dtype(a.gradient_dtype, [&](auto gradient) {
        with_form(a.form,
                  [&](auto form) { update_as<R, decltype(gradient), decltype(form)::value>(a, stream); });
      });
    }
  });
}

}  // namespace lm::gpu
