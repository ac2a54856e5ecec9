// The expert that every token meets beside those that its router chooses: a gated MLP, which may have a gate
// of its own, sigmoid(g x), one number for each token. It is a sublayer beside the experts
// (SublayerSpec::beside), so that they stay as they are. What the model computes with it is in
// model/mixers/shared_expert.h.
#pragma once

#include <cstdint>

#include "base/activation.h"
#include "spec/mixers/parameters.h"

namespace lm {

struct SharedExpertSpec {
  static constexpr const char* norm_name() {
    return "mlp.norm";
  }  // the norm of the experts beside which it stands

  Activation activation = Activation::kSilu;
  int64_t ffn = 0;     // S
  bool gated = false;  // by g
  bool operator==(const SharedExpertSpec&) const = default;
};

// shared.gate_up [2S, H], shared.down [H, S] and, of a gated one, shared.weight [1, H].
MixerParameters mixer_parameters(const SharedExpertSpec& spec, int64_t hidden);

}  // namespace lm
