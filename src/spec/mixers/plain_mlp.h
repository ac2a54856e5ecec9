// The MLP without a gate: down(activation(up x)).
#pragma once

#include <cstdint>

#include "base/activation.h"
#include "spec/mixers/parameters.h"

namespace lm {

struct PlainMlpSpec {
  static constexpr const char* norm_name() { return "mlp.norm"; }  // the weight of the norm before it

  Activation activation = Activation::kGeluTanh;
  int64_t ffn = 0;  // F
  bool bias = false;
  bool operator==(const PlainMlpSpec&) const = default;
};

// mlp.up [F, H], mlp.down [H, F].
MixerParameters mixer_parameters(const PlainMlpSpec& spec, int64_t hidden);

}  // namespace lm
