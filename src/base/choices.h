// Choices that the configuration has in common with the files of models and adapters, and their words there.
#pragma once

#include <cstdint>
#include <string_view>

namespace lm {

// Which biases are trained beside pairs of low rank: as copies, which are used in their place.
enum class AdapterBias : uint8_t {
  kNone,
  kAll,       // the layers' and the final norm's, whatever has them
  kLoraOnly,  // of the layers that have pairs
};
inline constexpr std::string_view kAdapterBiasNames[] = {"none", "all", "lora_only"};

// What the scores of a head are, and with them the loss. kAuto, which no model has: regression with one
// label, else one label of several.
enum class LabelProblem : uint8_t { kAuto, kSingleLabel, kMultiLabel, kRegression };

}  // namespace lm
