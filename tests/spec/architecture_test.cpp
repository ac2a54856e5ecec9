#include "spec/architecture.h"

#include <gtest/gtest.h>

#include <functional>

namespace lm {
namespace {

// A model with something in every place.
ModelSpec whole() {
  ModelSpec spec;
  spec.model_type = "some";
  spec.hidden = 8;
  spec.vocab = 30;
  spec.ropes = {{.dim = 4}, {.dim = 4, .scaling = RopeSpec::Scaling::kYarn}};
  const AttentionSpec attention{.heads = 2, .kv_heads = 1, .head_dim = 4, .value_norm = NormSpec{}};
  const NormSpec norm;
  const LayerSpec gated{{{norm, attention}, {norm, GatedMlpSpec{.ffn = 12}, norm}}};
  const LayerSpec plain{{{norm, attention}, {norm, PlainMlpSpec{.ffn = 12}}}};
  spec.layers = {gated, plain};
  return spec;
}

PlainMlpSpec& plain_mlp(ModelSpec& spec) {
  return std::get<PlainMlpSpec>(spec.layers[1].sublayers[1].mixer);
}

struct Change {
  const char* said;
  std::function<void(ModelSpec&)> make;
};

std::vector<Change> changes() {
  using Scaling = RopeSpec::Scaling;
  const auto attention = [](auto&& change) {
    return [change](ModelSpec& spec) { change(spec.layers[1].attention()); };
  };
  const auto rope = [](auto&& change) { return [change](ModelSpec& spec) { change(spec.ropes[1]); }; };
  return {
      {"model_type", [](ModelSpec& s) { s.model_type = "another"; }},
      {"the final norm", [](ModelSpec& s) { s.final_norm.kind = NormKind::kLayer; }},
      {"the eps of the final norm", [](ModelSpec& s) { s.final_norm.eps = 1e-3; }},
      {"the embedding's factor", [](ModelSpec& s) { s.embedding.scale = 2; }},
      {"the rounding of the embedding's factor", [](ModelSpec& s) { s.embedding.round_scale = true; }},
      {"the number of learned positions", [](ModelSpec& s) { s.embedding.positions = 7; }},
      {"logit_scale", [](ModelSpec& s) { s.head.logit_scale = 2; }},
      {"final_logit_softcapping", [](ModelSpec& s) { s.head.logit_cap = 30; }},
      {"beside another of layer 1", [](ModelSpec& s) { s.layers[1].sublayers[1].beside = true; }},
      {"the norm after a sublayer of layer 0",
       [](ModelSpec& s) { s.layers[0].sublayers[1].norm_after.reset(); }},
      {"the residual scale of layer 1", [](ModelSpec& s) { s.layers[1].sublayers[0].residual_scale = 2; }},
      {"the layer_scalar of layer 1", [](ModelSpec& s) { s.layers[1].scalar = true; }},
      {"the kind of a sublayer of layer 0",
       [](ModelSpec& s) { s.layers[0].sublayers[1].mixer = PlainMlpSpec{.ffn = 12}; }},
      {"intermediate_size of layer 1", [](ModelSpec& s) { plain_mlp(s).ffn = 13; }},
      {"the activation of layer 1", [](ModelSpec& s) { plain_mlp(s).activation = Activation::kRelu2; }},
      {"the bias of the MLP of layer 1", [](ModelSpec& s) { plain_mlp(s).bias = true; }},
      {"one norm for all heads", attention([](AttentionSpec& a) { a.joint_norm = true; })},
      {"a norm of each head's own", attention([](AttentionSpec& a) { a.own_norms = true; })},
      {"the norm of v's heads",
       attention([](AttentionSpec& a) { a.value_norm->kind = NormKind::kRmsPlain; })},
      {"attention_k_eq_v", attention([](AttentionSpec& a) { a.values_are_keys = true; })},
      {"the RoPE table", attention([](AttentionSpec& a) { a.rope = 1; })},
      {"the softmax's scale", attention([](AttentionSpec& a) { a.softmax_scale = 1; })},
      {"attn_logit_softcapping", attention([](AttentionSpec& a) { a.softcap = 50; })},
      {"llama_4_scaling_beta", attention([](AttentionSpec& a) { a.position_slope = 0.1; })},
      {"positions by which queries", attention([](AttentionSpec& a) { a.position_period = 5; })},
      {"features that RoPE turns", rope([](RopeSpec& r) { r.dim = 2; })},
      {"neighbours", rope([](RopeSpec& r) { r.neighbours = true; })},
      {"the scaling of RoPE", rope([](RopeSpec& r) { r.scaling = Scaling::kLinear; })},
      {"the factor of RoPE", rope([](RopeSpec& r) { r.factor = 2; })},
      {"attention_factor", rope([](RopeSpec& r) { r.attention_factor = 2; })},
      {"original_max_position_embeddings", rope([](RopeSpec& r) { r.original_max_position = 7; })},
      {"beta_fast", rope([](RopeSpec& r) { r.beta_fast = 7; })},
      {"beta_slow", rope([](RopeSpec& r) { r.beta_slow = 7; })},
      {"truncate", rope([](RopeSpec& r) { r.truncate = false; })},
      {"the number of RoPE tables", [](ModelSpec& s) { s.ropes.pop_back(); }},
  };
}

TEST(Architecture, EveryFieldThatChangesAResultIsCompared) {
  EXPECT_EQ(architecture_difference(whole(), whole()), "");
  for (const Change& change : changes()) {
    ModelSpec other = whole();
    change.make(other);
    const std::string said = architecture_difference(whole(), other);
    EXPECT_NE(said.find(change.said), std::string::npos) << change.said << ": " << said;
  }
}

TEST(Architecture, OfAKindOfRopeItsOwnNumbersAreCompared) {
  using Scaling = RopeSpec::Scaling;
  const std::vector<std::pair<Scaling, Change>> own = {
      {Scaling::kDynamic,
       {"original_max_position_embeddings", [](ModelSpec& s) { s.ropes[0].original_max_position = 1; }}},
      {Scaling::kLlama3, {"low_freq_factor", [](ModelSpec& s) { s.ropes[0].low_freq_factor = 2; }}},
      {Scaling::kLongRope,
       {"short_factor is [1, 2]",
        [](ModelSpec& s) {
          s.ropes[0].short_factors = {1, 2};
        }}},
      {Scaling::kLongRope,
       {"long_factor",
        [](ModelSpec& s) {
          s.ropes[0].long_factors = {1, 2};
        }}},
      {Scaling::kProportional, {"partial_rotary_factor", [](ModelSpec& s) { s.ropes[0].turned = 1; }}}};
  for (const auto& [scaling, change] : own) {
    ModelSpec model = whole();
    model.ropes[0].scaling = scaling;
    ModelSpec other = model;
    change.make(other);
    const std::string said = architecture_difference(model, other);
    EXPECT_NE(said.find(change.said), std::string::npos) << change.said << ": " << said;
    // Where nothing reads them they are no difference.
    model.ropes[0].scaling = other.ropes[0].scaling = Scaling::kNone;
    EXPECT_EQ(architecture_difference(model, other), "");
  }
}

TEST(Architecture, OfAMixtureItsRouterAndItsNormsAreCompared) {
  const NormSpec norm{.kind = NormKind::kRmsLate};
  ModelSpec model = whole();
  LayerSpec& layer = model.layers[1];
  layer.sublayers[1].norm_after = layer.sublayers[1].norm_joined = norm;
  layer.sublayers.push_back(
      {.norm = {},
       .mixer =
           ExpertsSpec{
               .experts = 4, .chosen = 2, .ffn = 8, .input_norm = norm, .router_norm = norm, .factors = true},
       .norm_after = norm,
       .beside = true});
  const auto experts = [](auto&& change) {
    return [change](ModelSpec& s) { change(std::get<ExpertsSpec>(s.layers[1].sublayers[2].mixer)); };
  };
  EXPECT_EQ(architecture_difference(model, model), "");
  for (const Change& change : std::vector<Change>{
           {"the norm of several sublayers of layer 1",
            [](ModelSpec& s) { s.layers[1].sublayers[1].norm_joined.reset(); }},
           {"the eps of the norm of several",
            [](ModelSpec& s) { s.layers[1].sublayers[1].norm_joined->eps = 1; }},
           {"num_experts_per_tok", experts([](ExpertsSpec& e) { e.chosen = 1; })},
           {"the norm of the experts' input",
            experts([](ExpertsSpec& e) { e.input_norm->kind = NormKind::kRms; })},
           {"the eps of the norm of the router's", experts([](ExpertsSpec& e) { e.router_norm->eps = 1; })},
           {"the factors of the router's weights", experts([](ExpertsSpec& e) { e.factors = false; })},
       }) {
    ModelSpec other = model;
    change.make(other);
    const std::string said = architecture_difference(model, other);
    EXPECT_NE(said.find(change.said), std::string::npos) << change.said << ": " << said;
  }
}

// The same text inside another model computes the same.
TEST(Architecture, TheModelAroundIsNoDifference) {
  ModelSpec other = whole();
  other.wrapper = "gemma3";
  EXPECT_EQ(architecture_difference(whole(), other), "");
}

}  // namespace
}  // namespace lm
