// A matrix that steps by its orthogonal momentum, on the CPU: what comes before the products and behind them.
#include "kernels/norms_formula.h"
#include "kernels/update_range.h"

namespace lm::LM_ISA {
namespace {

template <class R, class G>
void make_direction(const RuleUpdate& a, int64_t begin, int64_t end) {
  const R rule = a.rule.as<R>();
  const F32 scale(a.gradient_scale);
  const G* const gradient = static_cast<const G*>(a.gradient) + begin;
  float* const state = static_cast<float*>(a.state[0]) + begin;
  Bf16* const direction = static_cast<Bf16*>(a.muon.direction) + begin;
  each_vector(end - begin, [&](int64_t i, auto count) LM_BODY {
    F32 m = load(state + i, count);
    const F32 d = R::direction(rule, load(gradient + i, count) * scale, m);
    store(state + i, one_nan(m), count);
    store(direction + i, one_nan(d), count);
  });
}

template <class R, MasterForm form>
void take_step(const RuleUpdate& a, float size, int64_t begin, int64_t end) {
  const R rule = a.rule.as<R>();
  const Bf16* const direction = static_cast<const Bf16*>(a.muon.direction);
  Numbers numbers(a);
  each_vector(end - begin, [&](int64_t k, auto count) LM_BODY {
    const int64_t i = begin + k;
    const F32 p = R::step(rule, load(direction + i, count), size, load_weight<form>(a, i, count));
    U32 random(0);
    if constexpr (rounds_stochastically(form)) random = numbers.at(i);
    store_weight<form>(a, i, one_nan(p), random, count);
  });
}

template <class R>
void first_call(const RuleUpdate& a, StreamView stream) {
  with_gradient_dtype("update", a.gradient_dtype, [&](auto gradient) {
    parallel_elements(stream.threads, a.elements, [&](int64_t begin, int64_t end) {
      make_direction<R, decltype(gradient)>(a, begin, end);
    });
  });
  const int64_t padded = (a.elements + kGranuleElements - 1) / kGranuleElements * kGranuleElements;
  std::fill_n(static_cast<uint16_t*>(a.muon.direction) + a.elements, padded - a.elements, uint16_t{0});
}

template <class R>
void second_call(const RuleUpdate& a, StreamView stream) {
  const float size = a.rule.as<R>().step_size(a.muon.rows, a.muon.columns);
  with_form<R>(a.form, [&](auto form) {
    parallel_elements(stream.threads, a.elements, [&](int64_t begin, int64_t end) {
      take_step<R, decltype(form)::value>(a, size, begin, end);
    });
  });
}

}  // namespace

void update_muon(const RuleUpdate& a, StreamView stream) {
  if (a.elements != a.muon.rows * a.muon.columns)
    refuse_arguments("update", "a matrix's elements are not its rows x columns");
  Rules::with(a.rule.id, [&](auto type) {
    using R = typename decltype(type)::type;
    if constexpr (kIsMuon<R>) {
      a.muon.call == MuonState::Call::kDirection ? first_call<R>(a, stream) : second_call<R>(a, stream);
    } else {
      refuse_arguments("update", "an orthogonal step for a rule that has none");
    }
  });
}

}  // namespace lm::LM_ISA
