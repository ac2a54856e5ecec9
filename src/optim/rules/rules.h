// The table of rules, one line each, and what is derived from it: names, settings and state tensors of all
// rules, and the mapping from a number to its type.
#pragma once

#include "optim/rules/adafactor.h"
#include "optim/rules/adafactor_lowmem.h"
#include "optim/rules/adamw.h"
#include "optim/rules/adamw_4bit.h"
#include "optim/rules/adamw_8bit.h"
#include "optim/rules/adamw_anyprecision.h"
#include "optim/rules/adamw_bf16.h"
#include "optim/rules/adamw_fp8.h"
#include "optim/rules/lion.h"
#include "optim/rules/lion_8bit.h"
#include "optim/rules/muon.h"
#include "optim/rules/sgd.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <tuple>
#include <type_traits>

namespace lm {

// A rule's place in the table.
enum class RuleId : uint8_t {};

template <class... R>
struct RuleList {
  static constexpr size_t kSize = sizeof...(R);
  static constexpr RuleText kTexts[] = {R::kText...};
  static constexpr std::span<const StateTensor> kStateTensors[] = {R::kStateTensors...};
  static constexpr size_t kMostStateTensors = std::max({R::kStateTensors.size()...});
  static constexpr size_t kMostStates = static_cast<size_t>(std::max({kStateCount<R>...}));
  static constexpr bool kCoded[] = {kIsCoded<R>...};
  static constexpr bool kFactored[] = {kIsFactored<R>...};
  static constexpr bool kMuonSteps[] = {kIsMuon<R>...};
  static constexpr bool kNoMaster[] = {kHasNoMaster<R>...};
  static constexpr size_t kMostBytes = std::max({sizeof(R)...});
  using Settings = std::tuple<typename R::Settings...>;

  template <class One>
  static constexpr RuleId id() {
    uint8_t i = 0;
    (void)((std::is_same_v<One, R> || (++i, false)) || ...);
    return RuleId{i};
  }
  // Calls body(std::type_identity<R>()) for the rule, or for every rule in turn.
  template <class Body>
  LM_INLINE void with(RuleId rule, const Body& body) {
    (void)((rule == id<R>() && (body(std::type_identity<R>()), true)) || ...);
  }
  template <class Body>
  LM_INLINE void each(const Body& body) {
    (body(std::type_identity<R>()), ...);
  }
};

template <int n = 0, class... R>
constexpr auto list_rules() {
  if constexpr (requires { typename RuleAt<n>::Rule; }) {
    return list_rules<n + 1, R..., typename RuleAt<n>::Rule>();
  } else {
    return RuleList<R...>();
  }
}
using Rules = decltype(list_rules());

constexpr const RuleText& rule_text(RuleId rule) {
  return Rules::kTexts[static_cast<size_t>(rule)];
}

constexpr bool is_coded(RuleId rule) {
  return Rules::kCoded[static_cast<size_t>(rule)];
}

constexpr bool is_factored(RuleId rule) {
  return Rules::kFactored[static_cast<size_t>(rule)];
}

constexpr bool is_muon(RuleId rule) {
  return Rules::kMuonSteps[static_cast<size_t>(rule)];
}

// Whether it updates bf16 weights without masters, and no others.
constexpr bool has_no_master(RuleId rule) {
  return Rules::kNoMaster[static_cast<size_t>(rule)];
}

constexpr bool takes_form(RuleId rule, MasterForm form) {
  return has_no_master(rule) ? takes_form<AdamWBf16>(form) : takes_form<AdamW>(form);
}

// The keys of every rule, each with its value.
struct RuleSettings {
  Rules::Settings all;
  template <class R>
  auto& of() {
    return std::get<static_cast<size_t>(Rules::id<R>())>(all);
  }
  template <class R>
  const auto& of() const {
    return std::get<static_cast<size_t>(Rules::id<R>())>(all);
  }
};

// Whether the rule has no state tensors with these settings.
inline bool is_stateless(RuleId rule, const RuleSettings& settings) {
  bool out = false;
  Rules::with(rule, [&](auto type) {
    using R = typename decltype(type)::type;
    if constexpr (kMayBeStateless<R>) out = R::stateless(settings.of<R>());
  });
  return out;
}

// The form of a rule's weights. Those of a rule without masters have none, whatever `master` is, and are
// rounded to nearest.
constexpr MasterForm master_form(RuleId rule, Master master, DType weight) {
  if (weight != DType::kF32 && has_no_master(rule)) return MasterForm::kNearest;
  return master_form(master, weight);
}
// The same, with the rule's setting of the rounding.
inline MasterForm master_form(RuleId rule, const RuleSettings& settings, Master master, DType weight) {
  MasterForm form = master_form(rule, master, weight);
  Rules::with(rule, [&](auto type) {
    const auto& own = settings.of<typename decltype(type)::type>();
    if constexpr (requires { own.rounding; }) {
      const bool nearest = form != MasterForm::kNearest || own.rounding == Rounding::kNearest;
      if (!nearest) form = MasterForm::kStochastic;
    }
  });
  return form;
}

// The layout of a tile's state: each state tensor's part as one array, the master last.
class StateTensors {
 public:
  StateTensors(RuleId rule, MasterForm form, bool stateless = false) {
    const std::span<const StateTensor> streams = Rules::kStateTensors[static_cast<size_t>(rule)];
    for (size_t s = 0; s < streams.size() && !stateless; ++s) state_tensors_[count_++] = streams[s];
    if (has_master(form)) state_tensors_[count_++] = master_state_tensor(form);
  }
  const StateTensor* begin() const { return state_tensors_; }
  const StateTensor* end() const { return state_tensors_ + count_; }
  size_t size() const { return count_; }
  const StateTensor& operator[](size_t s) const { return state_tensors_[s]; }
  // Whether every state tensor has one value per element, so that bytes follow from the number of elements.
  bool of_elements() const {
    return std::all_of(begin(), end(),
                       [](const StateTensor& stream) { return stream.of == StateTensorOf::kAll; });
  }
  // For so many elements: the size of all state tensors, or the offset of `stream`.
  int64_t bytes(const Elements& elements) const { return offset(count_, elements); }
  int64_t offset(size_t stream, const Elements& elements) const {
    int64_t sum = 0;
    for (size_t s = 0; s < stream; ++s) sum += state_tensors_[s].bytes(elements);
    return sum;
  }

 private:
  StateTensor state_tensors_[Rules::kMostStateTensors + 1] = {};
  size_t count_ = 0;
};

// The scalars of a pass, with their rule.
class RuleScalars {
 public:
  RuleScalars() = default;
  template <class R>
  requires requires { R::kText; }
  RuleScalars(const R& rule) : id(Rules::id<R>()) { std::memcpy(bytes_, &rule, sizeof rule); }
  static RuleScalars at(RuleId rule, const RuleSettings& settings, const RulePass& pass) {
    RuleScalars out;
    Rules::with(rule, [&](auto type) {
      using R = typename decltype(type)::type;
      out = R::at(settings.of<R>(), pass);
    });
    return out;
  }
  // The scalars as the type of `id`.
  template <class R>
  R as() const {
    static_assert(std::is_trivially_copyable_v<R>);
    R rule;
    std::memcpy(&rule, bytes_, sizeof rule);
    return rule;
  }
  RuleId id{};

 private:
  alignas(8) std::byte bytes_[Rules::kMostBytes] = {};
};

}  // namespace lm
