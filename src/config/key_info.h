// What is said of each key where it is visited (config_visit.h). Values.
#pragma once

#include <cstdint>

#include "base/range.h"

namespace lm {

// What a changed key means at resume: placement and reporting may change, the others refuse. --override lets
// a run resume with other numerics. Keys of kState decide the shapes and types of a checkpoint's state, those
// of kTokens the tokens that a run began with: no run can resume with other values, so --override is not
// proposed for them.
enum class KeyTag : uint8_t { kNumerics, kState, kTokens, kPlacement, kReporting };
constexpr bool changes_results(KeyTag tag) {
  return tag == KeyTag::kNumerics || tag == KeyTag::kState || tag == KeyTag::kTokens;
}

struct KeyInfo {
  KeyTag tag;
  const char* help;
  Range range = {};
  bool required = false;       // a string or list that must not be empty
  const char* rule = nullptr;  // a key of that optimizer's rule only
  bool used = true;            // false: a key of a rule that is not chosen
};

// A bound that only keeps sums computable: printed only to those who exceed it.
inline constexpr double kMostCounted = 1e15;
inline constexpr Range kCountFromOne = {.low = 1, .high = kMostCounted};
inline constexpr Range kCountFromZero = {.low = 0, .high = kMostCounted};
inline constexpr Range kThreads = {.low = 1, .high = 4096};

}  // namespace lm
