// The input of a layer (Gemma 4's and Gemma 3n's "per-layer input"): down(activation(gate x) * p), where p is
// what the embedding stage has made for this layer of each token (InputsSpec, model_spec.h).
#pragma once

#include <cstdint>

#include "base/activation.h"
#include "spec/mixers/parameters.h"

namespace lm {

struct LayerInputSpec {
  static constexpr const char* norm_name() { return "input.norm"; }  // the weight of the norm before it

  Activation activation = Activation::kGeluTanh;
  int64_t width = 0;  // P
  bool operator==(const LayerInputSpec&) const = default;
};

// input.gate [P, H], input.out [H, P].
MixerParameters mixer_parameters(const LayerInputSpec& spec, int64_t hidden);

}  // namespace lm
