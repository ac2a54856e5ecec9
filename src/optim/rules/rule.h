// What an optimizer is. A rule is a type in a file of this folder; rules.h lists them, and configuration,
// plan, kernels, state and help take from there all they know of one. Pure values, any thread.
//
//   struct Example {
//     static constexpr RuleText kText = {"example", "what it is"};          // optimizer.name, help
//     static constexpr std::array kStreams = {StateStream{"m", "first moment"}};
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
// and nothing is contracted, so that both give the same bits. `state` has the element's value of each stream.
// The gradient comes clipped; a NaN that `update` leaves is stored as 0x7FC00000. The master beside a bf16
// weight is no rule's matter: every rule works in fp32 and has all of its forms.
//
// A rule whose state is statistics of a matrix's rows and columns has, in place of `update`, what
// factored.h asks for. A rule that steps whole matrices by products has, beside `update` for the rest, what
// muon.h shows.
//
// Nor is how state is kept: with `kCodes`, a map for each value of the state (codes.h), and kStreams =
// coded_streams(...), `update` has the values of the codes, and what it leaves is coded again.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/dtype.h"
#include "base/elements.h"
#include "base/host_device.h"
#include "base/range.h"

namespace lm {

struct RuleText {
  const char* name;
  const char* help;
  // Ranges are whole tensors (statistics of rows and columns, orthogonal updates): no tile cuts one.
  bool whole_tensors = false;
};

// What a stream has values of: all elements; where state is coded, those of small tensors (BlockLayout) and
// of the others; where it is statistics, the rows and the columns of matrices and the elements of vectors;
// where matrices of transformer blocks have less, the elements outside of them.
enum class StreamOf : uint8_t { kAll, kSmall, kLarge, kVectors, kRows, kColumns, kOutside };

// State that lies beside the weights.
struct StateStream {
  char name[16] = {};           // in lists of state: "block3.m"
  const char* title = nullptr;  // in the plan
  DType type = DType::kF32;
  StreamOf of = StreamOf::kAll;
  int64_t per = 1;  // elements that a value is for; a tensor's last one may be for fewer
  constexpr int64_t values(const Elements& elements) const {
    switch (of) {
      case StreamOf::kAll:
        return elements.all;
      case StreamOf::kSmall:
        return elements.small;
      case StreamOf::kLarge:
        return elements.large() / per;
      case StreamOf::kVectors:
        return elements.vectors;
      case StreamOf::kRows:
        return elements.rows;
      case StreamOf::kColumns:
        return elements.columns;
      case StreamOf::kOutside:
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

// What the scalars of a pass over a range depend on.
struct RulePass {
  double lr = 0;            // the schedule's, times the range's scale
  double weight_decay = 0;  // 0 for what is not decayed
  int64_t t = 1;            // updates so far, this one included; skipped steps do not count
};

// optimizer.master, of bf16 weights.
enum class Master : uint8_t { kSplit, kF32, kNone };

// How the fp32 value lives beside the weight. kWeight: the weight is fp32 itself. kSplit: bits M, weight = (M
// + 0x8000) >> 16, and M & 0xFFFF beside it. kF32: M beside the weight, which is rounded by the same rule.
// kStochastic: no master, the bf16 weight is rounded stochastically.
enum class MasterForm : uint8_t { kWeight, kSplit, kF32, kStochastic };

constexpr MasterForm master_form(Master master, DType weight) {
  if (weight == DType::kF32) return MasterForm::kWeight;
  if (master == Master::kNone) return MasterForm::kStochastic;
  return master == Master::kSplit ? MasterForm::kSplit : MasterForm::kF32;
}
constexpr bool has_master(MasterForm form) {
  return form == MasterForm::kSplit || form == MasterForm::kF32;
}
constexpr StateStream master_stream(MasterForm form) {
  return {"master", "master", form == MasterForm::kSplit ? DType::kI16 : DType::kF32};
}

template <int n>
struct RuleAt;
// What is the same for a rule and for that whose state it codes: one kernel serves the small tensors of both.
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

// Whether the rule's state is coded, and how many values of it an element has.
template <class R>
inline constexpr bool kIsCoded = requires {
  R::kCodes;
};
// Whether it is statistics of rows and columns.
template <class R>
inline constexpr bool kIsFactored = requires {
  R::kFactored;
};
// Whether it steps matrices of transformer blocks by their orthogonal momentum, and `update` is of the rest.
template <class R>
inline constexpr bool kIsOrthogonal = requires {
  R::kOrthogonal;
};
template <class R>
inline constexpr int kStateCount = static_cast<int>(R::kStreams.size()) / (kIsCoded<R> ? 3 : 1);

}  // namespace lm
