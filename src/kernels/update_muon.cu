// A matrix that steps by its orthogonal momentum, on the GPU: what comes before the products and behind them.
// Compiled with -fmad=false: the CPU's bits.
#include "kernels/norms_formula.h"
#include "kernels/update_weights.cuh"

namespace lm::gpu {
namespace {

template <class R, class G>
__global__ void make_direction(RuleUpdate a, R rule, int64_t padded) {
  if (skipped(a)) return;  // the products of the last direction change nothing
  const float scale = gradient_scale(a);
  Bf16* const direction = static_cast<Bf16*>(a.muon.direction);
  float* const state = static_cast<float*>(a.state[0]);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < padded; i += step) {
    float d = 0;
    if (i < a.elements) {
      float m = state[i];
      d = R::direction(rule, to_float(static_cast<const G*>(a.gradient)[i]) * scale, m);
      state[i] = one_nan(m);
    }
    direction[i] = round_to<Bf16>(one_nan(d));
  }
}

template <class R, MasterForm form>
__global__ void take_step(RuleUpdate a, R rule, float size) {
  if (skipped(a)) return;
  const Bf16* const direction = static_cast<const Bf16*>(a.muon.direction);
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < a.elements; i += step) {
    Pack<float, 1> p = load_weights<form, 1>(a, i);
    p.at[0] = one_nan(R::step(rule, to_float(direction[i]), size, p.at[0]));
    store_weights<form, 1>(a, i, p);
  }
}

template <class R>
void first_call(const RuleUpdate& a, StreamView stream) {
  const int64_t padded = (a.elements + kGranuleElements - 1) / kGranuleElements * kGranuleElements;
  with_gradient_dtype(a.gradient_dtype, [&](auto gradient) {
    launch(make_direction<R, decltype(gradient)>, stride_blocks(padded), kThreads, stream, a, a.rule.as<R>(),
           padded);
  });
}

template <class R>
void second_call(const RuleUpdate& a, StreamView stream) {
  const R rule = a.rule.as<R>();
  const float size = rule.step_size(a.muon.rows, a.muon.columns);
  with_form<R>(a.form, [&](auto form) {
    launch(take_step<R, decltype(form)::value>, stride_blocks(a.elements), kThreads, stream, a, rule, size);
  });
}

}  // namespace

void update_muon(const RuleUpdate& a, StreamView stream) {
  LM_CHECK(a.elements == a.muon.rows * a.muon.columns, "update: rows x columns");
  Rules::with(a.rule.id, [&](auto type) {
    using R = typename decltype(type)::type;
    if constexpr (kIsMuon<R>) {
      a.muon.call == MuonState::Call::kDirection ? first_call<R>(a, stream) : second_call<R>(a, stream);
    } else {
      LM_CHECK(false, "update: an orthogonal step for a rule that has none");
    }
  });
}

}  // namespace lm::gpu
