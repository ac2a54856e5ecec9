// An optimizer's rule on the GPU: one pass, four elements per thread and turn. Compiled with -fmad=false: the
// CPU's bits.
#include "kernels/cuda_launchers.h"
#include "kernels/update_weights.cuh"

namespace lm::gpu {
namespace {

template <class R, class G, MasterForm form, int n>
__global__ void update(RuleUpdate a, R rule) {
  using State = StateOf<R>;
  constexpr int kStates = kStateCount<R>;
  constexpr bool kAlways = !kMayBeStateless<R>;
  if (skipped(a)) return;
  const float scale = gradient_scale(a);
  const bool kept = kAlways || a.state[0] != nullptr;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * n;
  for (int64_t i = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * n; i < a.elements;
       i += step) {
    const Pack<G, n> gradient = load_pack<n>(static_cast<const G*>(a.gradient) + i);
    Pack<float, n> state[kStates] = {}, p = load_weights<form, n>(a, i);
    for (int s = 0; kept && s < kStates; ++s) {
      const Pack<State, n> stored = load_pack<n>(static_cast<const State*>(a.state[s]) + i);
      for (int k = 0; k < n; ++k) state[s].at[k] = to_float(stored.at[k]);
    }
    for (int k = 0; k < n; ++k) {
      float of_element[kStates];
      for (int s = 0; s < kStates; ++s) of_element[s] = state[s].at[k];
      R::update(rule, to_float(gradient.at[k]) * scale, of_element, p.at[k]);
      for (int s = 0; s < kStates; ++s) state[s].at[k] = one_nan(of_element[s]);
      p.at[k] = one_nan(p.at[k]);
    }
    for (int s = 0; kept && s < kStates; ++s) {
      Pack<State, n> rounded;
      for (int k = 0; k < n; ++k) rounded.at[k] = round_to<State>(state[s].at[k]);
      store_pack<n>(static_cast<State*>(a.state[s]) + i, rounded);
    }
    store_weights<form, n>(a, i, p);
  }
}

template <class R, class G, MasterForm form>
void update_as(const RuleUpdate& a, StreamView stream) {
  bool pack = a.elements % 4 == 0 && aligned(4 * sizeof(G), a.gradient) &&
              aligned(form == MasterForm::kWeight ? 16 : 8, a.weight) &&
              aligned(has_fp32_master(form) ? 16 : 8, a.master);
  for (int s = 0; s < kStateCount<R>; ++s) pack = pack && aligned(4 * sizeof(StateOf<R>), a.state[s]);
  const R rule = a.rule.as<R>();
  if (pack) return launch(update<R, G, form, 4>, stride_blocks(a.elements / 4), kThreads, stream, a, rule);
  launch(update<R, G, form, 1>, stride_blocks(a.elements), kThreads, stream, a, rule);
}

}  // namespace

void update(const RuleUpdate& a, StreamView stream) {
  LM_CHECK(a.weight_dtype == weight_type(a.form), "update: weight type");
  LM_CHECK(takes_form(a.rule.id, a.form), "update: a form of masters that its rule does not take");
  if (is_factored(a.rule.id)) return update_factored(a, stream);
  if (a.muon.call != MuonState::Call::kNone) return update_muon(a, stream);
  LM_CHECK(a.codes[0] == nullptr || a.first_index % 64 == 0, "update: first_index");
  if (a.codes[0] != nullptr) return update_coded(a, stream);
  Rules::with(a.rule.id, [&](auto type) {
    using R = RuleFormula<typename decltype(type)::type>;
    if constexpr (!kIsFactored<R>) {
      with_gradient_dtype(a.gradient_dtype, [&](auto gradient) {
        with_form<R>(a.form,
                     [&](auto form) { update_as<R, decltype(gradient), decltype(form)::value>(a, stream); });
      });
    }
  });
}

}  // namespace lm::gpu
