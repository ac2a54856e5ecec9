// What one layer of a model is: a list of sublayers, each of them
// x += scale * norm_after(dropout(mixer(norm(x)))), or several beside each other, whose outputs are added.
// Layers of a model may differ in everything that stands here. A mixer is a type of its own (spec/mixers,
// model/mixers), and a kind of norm or activation names a formula that src/model has; code that depends on
// one visits the variant or switches over the kind without a default, so that the compiler finds every place
// that a new one concerns.
#pragma once

#include <optional>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "base/error.h"
#include "spec/mixers/attention.h"
#include "spec/mixers/experts.h"
#include "spec/mixers/gated_mlp.h"
#include "spec/mixers/layer_input.h"
#include "spec/mixers/plain_mlp.h"
#include "spec/mixers/shared_expert.h"
#include "spec/norm_spec.h"

namespace lm {

using MixerSpec =
    std::variant<AttentionSpec, GatedMlpSpec, PlainMlpSpec, LayerInputSpec, ExpertsSpec, SharedExpertSpec>;

inline MixerParameters mixer_parameters(const MixerSpec& mixer, int64_t hidden) {
  return std::visit([&](const auto& kind) { return mixer_parameters(kind, hidden); }, mixer);
}
struct SublayerSpec {
  std::optional<NormSpec> norm;  // before the mixer; unset: it reads the residual stream itself
  MixerSpec mixer;
  std::optional<NormSpec> norm_after = {};  // of the mixer's output
  // Of the first of several beside each other: of the sum of what their norm_after give, before that is
  // added. Each of them then reads the residual stream by a norm of its own, or as it is.
  std::optional<NormSpec> norm_joined = {};
  double residual_scale = 1;  // multiplies what is added to the residual stream
  double dropout = 0;         // of the mixer's output, while training
  // The mixer reads what the one before it has read: the residual stream as it was then, and without a
  // norm_joined that one's norm (`norm` is unset).
  bool beside = false;
  bool operator==(const SublayerSpec&) const = default;

  // Names of the norms' weights: "attn.norm", "attn.norm_after".
  const char* norm_name() const {
    return std::visit([](const auto& kind) { return kind.norm_name(); }, mixer);
  }
  std::string norm_after_name() const { return norm_name() + std::string("_after"); }
  std::string norm_joined_name() const { return norm_name() + std::string("_joined"); }
  std::string norm_bias_name() const { return norm_name() + std::string("_bias"); }
  std::string norm_after_bias_name() const { return norm_after_name() + "_bias"; }
};

struct LayerSpec {
  std::vector<SublayerSpec> sublayers;
  bool scalar = false;  // its output is multiplied by a number that the files hold and nobody trains

  // The layer's mixer of a type; null: it has none.
  template <class Mixer>
  const Mixer* find() const {
    return find_in<const Mixer>(*this);
  }
  // Of a layer that has one.
  const AttentionSpec& attention() const { return get<const AttentionSpec>(*this); }
  AttentionSpec& attention() { return get<AttentionSpec>(*this); }
  const GatedMlpSpec& mlp() const { return get<const GatedMlpSpec>(*this); }
  GatedMlpSpec& mlp() { return get<GatedMlpSpec>(*this); }
  bool operator==(const LayerSpec&) const = default;

 private:
  template <class Mixer, class Layer>
  static Mixer* find_in(Layer& layer) {
    for (auto& sublayer : layer.sublayers)
      if (Mixer* const mixer = std::get_if<std::remove_const_t<Mixer>>(&sublayer.mixer)) return mixer;
    return nullptr;
  }
  template <class Mixer, class Layer>
  static Mixer& get(Layer& layer) {
    Mixer* const mixer = find_in<Mixer>(layer);
    LM_CHECK(mixer != nullptr, "the layer has no such mixer");
    return *mixer;
  }
};

}  // namespace lm
