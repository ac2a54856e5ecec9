// The gated MLP (Shazeer, "GLU Variants Improve Transformer"): down(activation(gate x) * up x).
#pragma once

#include <cstdint>

#include "base/activation.h"
#include "spec/mixers/parameters.h"

namespace lm {

struct GatedMlpSpec {
  static constexpr const char* norm_name() { return "mlp.norm"; }  // the weight of the norm before it

  Activation activation = Activation::kSilu;
  int64_t ffn = 0;  // F
  bool bias = false;
  bool operator==(const GatedMlpSpec&) const = default;
};

// mlp.gate_up [2F, H], mlp.down [H, F].
MixerParameters mixer_parameters(const GatedMlpSpec& spec, int64_t hidden);

}  // namespace lm
