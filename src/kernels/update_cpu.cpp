// An optimizer's rule on the CPU: one pass over gradient, state and weight. Each range is walked in blocks of
// 64 elements, the unit of philox.h's numbers.
#include "kernels/update_range.h"

namespace lm::LM_ISA {
namespace {

template <class R, class G, MasterForm form>
void update_range(const RuleUpdate& a, int64_t begin, int64_t end) {
  constexpr int kStates = kStateCount<R>;
  const R rule = a.rule.as<R>();  // copied, so that stores through state cannot change it
  const F32 scale(a.gradient_scale);
  const G* gradient = static_cast<const G*>(a.gradient);
  StateOf<R>* states[kStates];
  each_of<kStates>([&](auto s) LM_BODY { states[s] = static_cast<StateOf<R>*>(a.state[s]); });
  const bool kept = !kMayBeStateless<R> || a.state[0] != nullptr;
  const auto update = [&](int64_t i, U32 random, auto count) LM_BODY {
    prefetch(gradient, i);
    if (kept) each_of<kStates>([&](auto s) LM_BODY { prefetch(states[s], i); });
    prefetch_weight<form>(a, i);
    F32 state[kStates], p = load_weight<form>(a, i, count);
    each_of<kStates>([&](auto s) LM_BODY { state[s] = kept ? load(states[s] + i, count) : F32(0.F); });
    R::update(rule, load(gradient + i, count) * scale, state, p);
    if (kept) each_of<kStates>([&](auto s) LM_BODY { store(states[s] + i, one_nan(state[s]), count); });
    store_weight<form>(a, i, one_nan(p), random, count);
  };
  if constexpr (rounds_stochastically(form)) {
    if (a.first_index % 64 != 0) {  // a parameter group may begin at any element
      Numbers numbers(a);
      each_vector(end - begin,
                  [&](int64_t i, auto count) LM_BODY { update(begin + i, numbers.at(begin + i), count); });
      return;
    }
    for (int64_t first = begin; first < end; first += 64) {
      const PhiloxWords<U32> numbers = rounding_numbers(a, first);
      for (int w = 0; w < 4 && first + w * kLanes < end; ++w) {
        const int64_t i = first + w * kLanes;
        if (i + kLanes <= end) {
          update(i, numbers.word[w], Whole{});
        } else {
          update(i, numbers.word[w], Part{static_cast<int>(end - i)});
        }
      }
    }
  } else {
    each_vector(end - begin, [&](int64_t i, auto count) LM_BODY { update(begin + i, U32(0), count); });
  }
}

}  // namespace

void update(const RuleUpdate& a, StreamView stream) {
  if (a.weight_dtype != weight_type(a.form)) refuse_dtype("update (weight)", a.weight_dtype);
  if (!takes_form(a.rule.id, a.form))
    refuse_arguments("update", "a form of masters that its rule does not take");
  if (is_factored(a.rule.id)) return update_factored(a, stream);
  if (a.muon.call != MuonState::Call::kNone) return update_muon(a, stream);
  if (a.codes[0] != nullptr) {
    if (a.first_index % 64 != 0) refuse_arguments("update", "first_index is no multiple of 64");
    return update_coded(a, stream);
  }
  Rules::with(a.rule.id, [&](auto type) {
    using R = RuleFormula<typename decltype(type)::type>;
    if constexpr (!kIsFactored<R>) {
      with_gradient_dtype("update", a.gradient_dtype, [&](auto gradient) {
        with_form<R>(a.form, [&](auto form) {
          parallel_elements(stream.threads, a.elements, [&](int64_t begin, int64_t end) {
            update_range<R, decltype(gradient), decltype(form)::value>(a, begin, end);
          });
        });
      });
    }
  });
}

}  // namespace lm::LM_ISA
