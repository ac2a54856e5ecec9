// The definition of an optimizer. A rule is a type in a file of this folder; rules.h lists them, and
// configuration, plan, kernels, state and help derive everything from there. Pure values, any thread.
//
//   struct Example {
//     static constexpr RuleText kText = {"example", "what it is"};          // optimizer.name, help
//     static constexpr std::array kStateTensors = {StateTensor{"m", "first moment"}};
//     struct Settings { double beta = 0.9; };                               // its keys of [optimizer]
//     template <class S, class Key> static void keys(S& settings, const Key& key) {
//       key("beta", settings.beta, "decay of the first moment", kFraction);
//     }
//     float beta = 0, ...;                                                  // a pass's scalars
//     static Example at(const Settings& settings, const RulePass& pass);    // in fp64, rounded once
//     template <class V> LM_HOST_DEVICE void update(const Example& c, V gradient, V* state, V& weight);
//   };
//   template <> struct RuleAt<7> { using Rule = Example; };                 // its place in the table
//
// `update` is one element's arithmetic, every operation fixed: V is float on the GPU, lanes of it on the CPU,
// and nothing is contracted, so that both give the same bits. `state` has the element's value of each state
// tensor. The gradient is already clipped; a NaN result of `update` is stored as 0x7FC00000. Masters of bf16
// weights are handled outside of rules: every rule computes in fp32 and supports all forms of masters, except
// one with `static constexpr bool kNoMaster = true`: it updates bf16 weights that have no master. State
// tensors of a rule are of one type, fp32 or bf16: `update` gets fp32 values, and its results are rounded to
// nearest even.
//
// A rule with `static bool stateless(const Settings&)` has no state tensors with settings for which that is
// true: `update` gets zeros then, and what it makes of them is dropped.
//
// A rule with factored second moments has, in place of `update`, the members listed in factored.h. A rule
// that updates whole matrices by products has, beside `update` for other tensors, the members shown in
// muon.h.
//
// Quantization of state is also handled outside: with `kCodes`, a map for each state tensor (codes.h), and
// kStateTensors = coded_state_tensors(...), `update` gets dequantized values, and its results are quantized
// again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/dtype.h"
#include "base/elements.h"
#include "base/host_device.h"
#include "base/range.h"

namespace lm {

struct RuleText {
  const char* name;
  const char* help;
  // Ranges are whole tensors (factored second moments, Muon): no tile splits one.
  bool whole_tensors = false;
};

// The elements of a state tensor: all; for quantized state those of small tensors (BlockLayout) or of the
// others; for factored moments the rows or the columns of matrices or the elements of vectors; for Muon the
// elements outside of transformer blocks' matrices.
enum class StateTensorOf : uint8_t { kAll, kSmall, kLarge, kVectors, kRows, kColumns, kOutside };

// A state tensor of the optimizer.
struct StateTensor {
  char name[16] = {};           // in lists of state: "block3.m"
  const char* title = nullptr;  // in the plan
  DType type = DType::kF32;
  StateTensorOf of = StateTensorOf::kAll;
  int64_t per = 1;  // elements per value; a tensor's last value may have fewer
  constexpr int64_t values(const Elements& elements) const {
    switch (of) {
      case StateTensorOf::kAll:
        return elements.all;
      case StateTensorOf::kSmall:
        return elements.small;
      case StateTensorOf::kLarge:
        return elements.large() / per;
      case StateTensorOf::kVectors:
        return elements.vectors;
      case StateTensorOf::kRows:
        return elements.rows;
      case StateTensorOf::kColumns:
        return elements.columns;
      case StateTensorOf::kOutside:
        return elements.outside;
    }
    return 0;
  }
  constexpr int64_t bytes(const Elements& elements) const {
    return values(elements) * static_cast<int64_t>(dtype_size(type));
  }
  constexpr void append(const char* text) {
    size_t end = 0;
    while (name[end] != 0) ++end;
    while (*text != 0) name[end++] = *text++;
  }
};

// The inputs of the scalars of a pass over a range.
struct RulePass {
  double lr = 0;            // the schedule's, times the range's scale
  double weight_decay = 0;  // 0 for tensors without decay
  int64_t t = 1;            // updates so far, this one included; skipped steps do not count
};

// optimizer.master, for bf16 and fp16 weights.
enum class Master : uint8_t { kSplit, kF32, kNone };

// The form of the fp32 master of a weight. kWeight: the weight is fp32 itself. kSplit: bits M, weight = (M +
// 0x8000) >> 16, and M & 0xFFFF separately. kF32: M separately; the weight is rounded by the same rule.
// kStochastic, kNearest: no master, the bf16 weight is rounded stochastically, or to nearest even.
// kF32OfFp16, kStochasticFp16: the same as kF32 and kStochastic for fp16 weights; the former round to nearest
// even. An fp16 weight is no part of its master's bits, so there is no split.
enum class MasterForm : uint8_t { kWeight, kSplit, kF32, kStochastic, kNearest, kF32OfFp16, kStochasticFp16 };

// optimizer.rounding, of weights that have no master by their rule.
enum class Rounding : uint8_t { kNearest, kStochastic };

constexpr MasterForm master_form(Master master, DType weight) {
  if (weight == DType::kF32) return MasterForm::kWeight;
  if (weight == DType::kF16)
    return master == Master::kNone ? MasterForm::kStochasticFp16 : MasterForm::kF32OfFp16;
  if (master == Master::kNone) return MasterForm::kStochastic;
  return master == Master::kSplit ? MasterForm::kSplit : MasterForm::kF32;
}
// Whether the fp32 master is a state tensor of its own.
constexpr bool has_fp32_master(MasterForm form) {
  return form == MasterForm::kF32 || form == MasterForm::kF32OfFp16;
}
constexpr bool has_master(MasterForm form) {
  return form == MasterForm::kSplit || has_fp32_master(form);
}
constexpr bool rounds_stochastically(MasterForm form) {
  return form == MasterForm::kStochastic || form == MasterForm::kStochasticFp16;
}
// Type of the weights in this form.
constexpr DType weight_type(MasterForm form) {
  if (form == MasterForm::kWeight) return DType::kF32;
  const bool fp16 = form == MasterForm::kF32OfFp16 || form == MasterForm::kStochasticFp16;
  return fp16 ? DType::kF16 : DType::kBF16;
}
constexpr StateTensor master_state_tensor(MasterForm form) {
  return {"master", "master", form == MasterForm::kSplit ? DType::kI16 : DType::kF32};
}

template <int n>
struct RuleAt;
// The formula type, the same for a rule and its quantized variant: one kernel serves the small tensors of
// both.
template <class R>
struct FormulaOf {
  using Rule = R;
};
template <class R>
requires requires {
  typename R::Formula;
}
struct FormulaOf<R> {
  using Rule = typename R::Formula;
};
template <class R>
using RuleFormula = typename FormulaOf<R>::Rule;

// Whether the rule's state is quantized, and its number of values per element.
template <class R>
inline constexpr bool kIsCoded = requires {
  R::kCodes;
};
// Whether it has factored second moments.
template <class R>
inline constexpr bool kIsFactored = requires {
  R::kFactored;
};
// Whether it updates matrices of transformer blocks by Muon (Newton–Schulz), and `update` only other tensors.
template <class R>
inline constexpr bool kIsMuon = requires {
  R::kMuonSteps;
};
// Whether it updates bf16 weights without masters, and no others.
template <class R>
inline constexpr bool kHasNoMaster = requires {
  R::kNoMaster;
};
// Whether its settings decide if it has state.
template <class R>
inline constexpr bool kMayBeStateless = requires(const typename R::Settings& settings) {
  R::stateless(settings);
};
template <class R>
constexpr bool takes_form(MasterForm form) {
  const bool rounds = form == MasterForm::kStochastic || form == MasterForm::kNearest;
  return kHasNoMaster<R> ? rounds : form != MasterForm::kNearest;
}
// The type in memory of its state tensors that are neither quantized nor factored.
template <class R>
using StateOf = std::conditional_t<R::kStateTensors[0].type == DType::kBF16, Bf16, float>;
template <class R>
inline constexpr int kStateCount = static_cast<int>(R::kStateTensors.size()) / (kIsCoded<R> ? 3 : 1);

}  // namespace lm
