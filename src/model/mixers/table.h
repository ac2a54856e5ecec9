// The mixers that a block can have, in the order of MixerSpec (spec/layer_spec.h). A new one is a line in
// each.
#pragma once

#include <variant>

#include "model/mixers/attention.h"
#include "model/mixers/experts.h"
#include "model/mixers/gated_mlp.h"
#include "model/mixers/layer_input.h"
#include "model/mixers/plain_mlp.h"
#include "model/mixers/shared_expert.h"

namespace lm {

using Mixer = std::variant<Attention, GatedMlp, PlainMlp, LayerInput, Experts, SharedExpert>;
using MixerSaved = std::variant<Attention::Saved, GatedMlp::Saved, PlainMlp::Saved, LayerInput::Saved,
                                Experts::Saved, SharedExpert::Saved>;

// A mixer of layer `layer` without its parameters.
inline Attention unbound_mixer(const AttentionSpec& spec, int64_t layer) {
  const Norm heads{.spec = spec.head_norm.value_or(NormSpec()), .weight = {}},
      values{.spec = spec.value_norm.value_or(NormSpec()), .weight = {}};
  return {.spec = spec,
          .layer = layer,
          .qkv = {},
          .q_norm = heads,
          .k_norm = heads,
          .v_norm = values,
          .out = {},
          .prefix = {},
          .sinks = {}};
}
inline GatedMlp unbound_mixer(const GatedMlpSpec& spec, int64_t /*layer*/) {
  return {.spec = spec, .gate_up = {}, .down = {}};
}
inline PlainMlp unbound_mixer(const PlainMlpSpec& spec, int64_t /*layer*/) {
  return {.spec = spec, .up = {}, .down = {}};
}
inline LayerInput unbound_mixer(const LayerInputSpec& spec, int64_t layer) {
  return {.spec = spec, .layer = layer, .gate = {}, .out = {}};
}
inline Experts unbound_mixer(const ExpertsSpec& spec, int64_t layer) {
  return {.spec = spec,
          .layer = layer,
          .router = {},
          .correction = {},
          .input_norm = {.spec = spec.input_norm.value_or(NormSpec()), .weight = {}},
          .router_norm = {.spec = spec.router_norm.value_or(NormSpec()), .weight = {}},
          .factors = {},
          .experts = std::vector<Experts::Expert>(static_cast<size_t>(spec.experts))};
}
inline SharedExpert unbound_mixer(const SharedExpertSpec& spec, int64_t /*layer*/) {
  return {.spec = spec, .gate_up = {}, .down = {}, .weight = {}};
}

}  // namespace lm
