// Layers of other shapes than Llama's, of any sizes: what each of these families adds. Of Llama's names for
// tensors those are missing that Llama has no tensor for.
#pragma once

#include <cmath>
#include <utility>

#include "spec/model_spec.h"

namespace lm {

// The same norm before every mixer and at the end.
inline void set_norms(ModelSpec& spec, const NormSpec& norm) {
  for (LayerSpec& layer : spec.layers) {
    for (SublayerSpec& sublayer : layer.sublayers) sublayer.norm = norm;
  }
  spec.final_norm = norm;
}

// LayerNorm and biases everywhere, an MLP without a gate, learned positions instead of RoPE, and dropouts.
inline void like_gpt2(ModelSpec& spec, int64_t positions) {
  set_norms(spec, {.kind = NormKind::kLayer, .eps = 1e-5});
  for (LayerSpec& layer : spec.layers) {
    AttentionSpec& attention = layer.attention();
    attention.qkv_bias = attention.out_bias = true;
    attention.rope = AttentionSpec::kNoRope;
    layer.sublayers[1].mixer =
        PlainMlpSpec{.activation = Activation::kGeluTanh, .ffn = layer.mlp().ffn, .bias = true};
    for (SublayerSpec& sublayer : layer.sublayers) sublayer.dropout = 0.1;
  }
  spec.ropes.clear();
  spec.embedding.positions = positions;
  spec.embedding.dropout = 0.1;
  spec.names.positions = "model.embed_positions";
}

// Norms with stored offsets before and behind each mixer, a factor of the embedding, a cap of the logits
// that bites, and a number that multiplies each layer's output.
inline void like_gemma(ModelSpec& spec) {
  set_norms(spec, {.kind = NormKind::kRmsOffset});
  for (LayerSpec& layer : spec.layers) {
    for (SublayerSpec& sublayer : layer.sublayers) sublayer.norm_after = sublayer.norm;
    layer.mlp().activation = Activation::kGeluTanh;
    layer.scalar = true;
  }
  for (const char* name : {"attn.norm_after", "mlp.norm_after"}) spec.names.norms.push_back({name, name});
  spec.names.vectors.push_back({"scalar", "scalar"});
  spec.embedding = {.scale = std::sqrt(static_cast<double>(spec.hidden)), .round_scale = true};
  spec.head.logit_cap = 0.5;
}

// An input for each layer, and a last layer that reads the keys and values of the first one with heads of the
// same kind, normed; the others keep their own.
inline void like_gemma4(ModelSpec& spec) {
  like_gemma(spec);
  for (size_t i = 0; i < spec.layers.size(); ++i) {
    LayerSpec& layer = spec.layers[i];
    AttentionSpec& attention = layer.attention();
    attention.head_norm = NormSpec{.kind = NormKind::kRmsLate};
    attention.softmax_scale = 0.3;
    attention.window = i % 2 == 0 ? 7 : 0;
    layer.sublayers.push_back({.norm = std::nullopt,
                               .mixer = LayerInputSpec{.activation = Activation::kGeluTanh, .width = 12},
                               .norm_after = spec.final_norm});
  }
  if (spec.layers.size() > 2) {
    spec.layers.front().attention().lends = true;
    AttentionSpec& last = spec.layers.back().attention();
    last.source = 0;
    last.window = 7;
    spec.layers.back().mlp().ffn *= 2;
  }
  spec.embedding.inputs = {
      .width = 12, .layers = spec.layer_count(), .vocab = spec.vocab + 20, .norm = spec.final_norm};
  spec.names.norms.push_back({"input.norm_after", "input.norm_after"});
  spec.names.modules.push_back({"input.gate", "input.gate"});
  spec.names.modules.push_back({"input.out", "input.out"});
  spec.names.input_table = "model.input_table";
  spec.names.input_projection = "model.input_projection";
  spec.names.input_norm = "model.input_norm";
}

// Both mixers beside each other behind one LayerNorm, LayerNorms of q's and k's heads, each with a weight of
// its own, and a factor of the logits.
inline void like_cohere(ModelSpec& spec) {
  set_norms(spec, {.kind = NormKind::kLayerNoBias, .eps = 1e-5});
  for (LayerSpec& layer : spec.layers) {
    layer.sublayers[1].norm.reset();
    layer.sublayers[1].beside = true;
    layer.attention().head_norm = spec.final_norm;
    layer.attention().own_norms = true;
  }
  spec.head.logit_scale = 0.0625;
}

// Factors of what is added to the residual stream, of the embedding and of the logits.
inline void like_granite(ModelSpec& spec) {
  for (LayerSpec& layer : spec.layers) {
    for (SublayerSpec& sublayer : layer.sublayers) sublayer.residual_scale = 0.22;
  }
  spec.embedding.scale = 12;
  spec.head.logit_scale = 0.125;
}

// Experts in place of the MLP, of which a token goes through `chosen`.
inline void like_qwen3_moe(ModelSpec& spec, int64_t experts = 5, int64_t chosen = 2) {
  for (LayerSpec& layer : spec.layers)
    layer.sublayers[1].mixer =
        ExpertsSpec{.experts = experts, .chosen = chosen, .ffn = 24, .renormalise = true};
  spec.names.modules.insert(spec.names.modules.end(), {{"mlp.gate", "experts.router"},
                                                       {"mlp.experts.*.gate_proj", "experts.gate"},
                                                       {"mlp.experts.*.up_proj", "experts.up"},
                                                       {"mlp.experts.*.down_proj", "experts.down"}});
}

// Beside the experts one that all tokens meet, with a gate of its own.
inline void add_shared_expert(ModelSpec& spec) {
  for (LayerSpec& layer : spec.layers)
    layer.sublayers.push_back(
        {.norm = std::nullopt, .mixer = SharedExpertSpec{.ffn = 40, .gated = true}, .beside = true});
  spec.names.modules.insert(spec.names.modules.end(), {{"mlp.shared_expert.gate_proj", "shared.gate"},
                                                       {"mlp.shared_expert.up_proj", "shared.up"},
                                                       {"mlp.shared_expert.down_proj", "shared.down"},
                                                       {"mlp.shared_expert_gate", "shared.weight"}});
}
inline void like_qwen2_moe(ModelSpec& spec) {
  like_qwen3_moe(spec);
  add_shared_expert(spec);
}

// Routers with sigmoid scores, corrections and groups.
inline void like_glm4_moe(ModelSpec& spec, int64_t experts = 6, int64_t groups = 3) {
  like_qwen3_moe(spec, experts, 3);
  for (LayerSpec& layer : spec.layers) {
    auto& experts = std::get<ExpertsSpec>(layer.sublayers[1].mixer);
    experts.scores = RouterScores::kSigmoid;
    experts.groups = groups, experts.kept_groups = 2;
    experts.weight_scale = 1.5;
    experts.wide_logits = true;
  }
  spec.names.vectors.push_back({"experts.correction", "mlp.gate.e_score_correction_bias"});
}

// Experts beside each MLP, with norms of their own and of the sum of both, and factors of the router's
// weights.
inline void like_gemma4_moe(ModelSpec& spec, int64_t experts = 5, int64_t chosen = 2) {
  like_gemma(spec);
  like_qwen3_moe(spec, experts, chosen);
  for (LayerSpec& layer : spec.layers) {
    SublayerSpec& mlp = layer.sublayers[1];
    auto of = std::get<ExpertsSpec>(
        std::exchange(mlp.mixer, GatedMlpSpec{.activation = Activation::kGeluTanh, .ffn = 40}));
    of.activation = Activation::kGeluTanh;
    of.factors = true;
    of.input_norm = NormSpec{.kind = NormKind::kRmsLate};
    of.router_norm = NormSpec{.kind = NormKind::kRms};
    mlp.norm_joined = mlp.norm_after;
    layer.sublayers.push_back({.norm = {}, .mixer = of, .norm_after = mlp.norm_after, .beside = true});
  }
  for (const char* name : {"mlp.norm_joined", "experts.input_norm", "experts.norm_after"})
    spec.names.norms.push_back({name, name});
  spec.names.vectors.insert(spec.names.vectors.end(), {{"experts.router_norm", "router.scale"},
                                                       {"experts.factors", "router.per_expert_scale"}});
}

// Sinks, a window in the first layer, and experts with biases and a clamped GLU that bites.
inline void like_gpt_oss(ModelSpec& spec, int64_t experts, int64_t chosen) {
  for (LayerSpec& layer : spec.layers) {
    layer.attention().sinks = true;
    layer.sublayers[1].mixer = ExpertsSpec{.experts = experts,
                                           .chosen = chosen,
                                           .ffn = 24,
                                           .renormalise = true,
                                           .bias = true,
                                           .router_bias = true,
                                           .clamped = ClampedGlu{.alpha = 1.702, .limit = 0.7}};
  }
  spec.layers.front().attention().window = 7;
  spec.names.vectors.push_back({"attn.sinks", "self_attn.sinks"});
  spec.names.modules.insert(spec.names.modules.end(), {{"mlp.router", "experts.router"},
                                                       {"mlp.experts.*.gate_up_proj", "experts.gate_up"},
                                                       {"mlp.experts.*.down_proj", "experts.down"}});
}

}  // namespace lm
