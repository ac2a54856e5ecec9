// Parameters that Llama's layers do not have: biases and offsets of norms, learned positions, transposed
// matrices, buffers.
#include "spec/parameter.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "base/error.h"
#include "spec/block_layout.h"

namespace lm {
namespace {

ModelSpec parse(const std::string& json) {
  return parse_model_spec(json, "config.json");
}

ModelSpec gpt2() {
  return parse(R"({"model_type": "gpt2", "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 5,
                   "vocab_size": 30})");
}

ModelSpec nemotron() {
  return parse(
      R"({"model_type": "nemotron", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
                   "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 30, "mlp_bias": true})");
}

ModelSpec gemma4() {
  return parse(
      R"({"model_type": "gemma4_text", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
                   "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 30, "head_dim": 4,
                   "global_head_dim": 6, "attention_k_eq_v": true, "hidden_size_per_layer_input": 0})");
}

std::vector<std::string> names(const std::vector<Parameter>& parameters) {
  std::vector<std::string> out;
  for (const Parameter& parameter : parameters) out.push_back(parameter.name);
  return out;
}

const Parameter& find(const std::vector<Parameter>& parameters, const std::string& name) {
  for (const Parameter& parameter : parameters)
    if (parameter.name == name) return parameter;
  throw std::runtime_error(name);
}

AdapterSpec adapter(const ModelSpec& spec, const std::vector<std::string>& targets) {
  return {.r = 2, .alpha = 4, .targets = resolve_targets(spec.names, targets, "test")};
}

TEST(Parameters, NormsBiasesFollowTheMatrices) {
  const auto blocks = list_parameters(nemotron(), nullptr);
  EXPECT_EQ(names(blocks[1].trainable),
            (std::vector<std::string>{"layers.0.attn.qkv", "layers.0.attn.out", "layers.0.mlp.up",
                                      "layers.0.mlp.down", "layers.0.attn.norm", "layers.0.mlp.norm",
                                      "layers.0.mlp.up_bias", "layers.0.mlp.down_bias",
                                      "layers.0.attn.norm_bias", "layers.0.mlp.norm_bias"}));
  const Parameter& bias = blocks[1].trainable.back();
  EXPECT_EQ(bias.kind, ParameterKind::kBias);
  EXPECT_EQ(bias.parts[0].name, "model.layers.0.post_attention_layernorm.bias");
  EXPECT_EQ(bias.rows, 8);
  EXPECT_TRUE(blocks[1].frozen.empty());
  EXPECT_EQ(names(blocks[3].trainable), (std::vector<std::string>{"head", "norm", "norm_bias"}));
  EXPECT_EQ(blocks[3].trainable[2].parts[0].name, "model.norm.bias");
}

TEST(Parameters, AnOffsetsFreshValueIsZero) {
  const std::vector<std::pair<ModelSpec, float>> cases = {{nemotron(), 0}, {gpt2(), 1}, {gemma4(), 1}};
  for (const auto& [spec, neutral] : cases) {
    const auto blocks = list_parameters(spec, nullptr);
    EXPECT_EQ(find(blocks[1].trainable, "layers.0.attn.norm").neutral, neutral) << spec.model_type;
    EXPECT_EQ(find(blocks.back().trainable, "norm").neutral, neutral) << spec.model_type;
  }
  const ModelSpec gemma3 = parse(R"({"model_type": "gemma3_text", "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 30})");
  EXPECT_EQ(find(list_parameters(gemma3, nullptr)[1].trainable, "layers.0.attn.q_norm").neutral, 0);
}

TEST(Parameters, LearnedPositionsFollowTheEmbedding) {
  const auto blocks = list_parameters(gpt2(), nullptr);
  EXPECT_EQ(names(blocks[0].trainable), (std::vector<std::string>{"embed", "positions"}));
  const Parameter& positions = blocks[0].trainable[1];
  EXPECT_EQ(positions.kind, ParameterKind::kEmbedding);
  EXPECT_EQ(positions.parts[0].name, "transformer.wpe.weight");
  EXPECT_EQ(positions.shape(positions.parts[0]), (std::vector<int64_t>{5, 8}));
  EXPECT_EQ(names(blocks[3].trainable), (std::vector<std::string>{"norm", "norm_bias"}));
}

TEST(Parameters, TransposedMatricesKeepTheirShapeHereAndTurnItInFiles) {
  const auto blocks = list_parameters(gpt2(), nullptr);
  const Parameter& qkv = find(blocks[1].trainable, "layers.0.attn.qkv");
  EXPECT_EQ(qkv.rows, 24);
  EXPECT_EQ(qkv.columns, 8);
  EXPECT_TRUE(qkv.parts.at(0).transposed);
  EXPECT_EQ(qkv.parts[0].name, "transformer.h.0.attn.c_attn.weight");
  EXPECT_EQ(qkv.shape(qkv.parts[0]), (std::vector<int64_t>{8, 24}));
  const Parameter& bias = find(blocks[1].trainable, "layers.0.attn.qkv_bias");
  EXPECT_FALSE(bias.parts.at(0).transposed);
  EXPECT_EQ(bias.shape(bias.parts[0]), (std::vector<int64_t>{24}));
  EXPECT_FALSE(
      find(list_parameters(nemotron(), nullptr)[1].trainable, "layers.0.mlp.up").parts[0].transposed);
}

TEST(Parameters, ModulesThatEndAlikeAreNamedByTheirPaths) {
  const AdapterSpec all = adapter(gpt2(), {"all-linear"});
  EXPECT_EQ(all.targets, (std::vector<std::string>{"c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"}));
  EXPECT_EQ(adapter(gpt2(), {"c_proj"}).targets, (std::vector<std::string>{"attn.c_proj", "mlp.c_proj"}));
  EXPECT_EQ(adapter(gpt2(), {"mlp.c_proj"}).targets, (std::vector<std::string>{"mlp.c_proj"}));
  const auto blocks = list_parameters(gpt2(), &all);
  EXPECT_EQ(names(blocks[1].trainable),
            (std::vector<std::string>{"layers.0.c_attn.lora_A", "layers.0.c_attn.lora_B",
                                      "layers.0.attn.c_proj.lora_A", "layers.0.attn.c_proj.lora_B",
                                      "layers.0.c_fc.lora_A", "layers.0.c_fc.lora_B",
                                      "layers.0.mlp.c_proj.lora_A", "layers.0.mlp.c_proj.lora_B"}));
  const Parameter& b = find(blocks[1].trainable, "layers.0.mlp.c_proj.lora_A");
  EXPECT_EQ(b.parts[0].name, "base_model.model.transformer.h.0.mlp.c_proj.lora_A.weight");
  EXPECT_EQ(b.columns, 32);  // as PEFT has it, whatever the files do to the matrix
  EXPECT_FALSE(b.parts[0].transposed);
  for (const char* vocabulary : {"wte", "transformer.wpe", "lm_head"}) {
    try {
      resolve_targets(gpt2().names, {vocabulary}, "test");
      ADD_FAILURE() << vocabulary;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("get no adapter"), std::string::npos) << error.what();
    }
  }
}

TEST(Parameters, ABufferIsFrozenInEveryRun) {
  const ModelSpec spec = gemma4();
  const AdapterSpec lora = adapter(spec, {"q_proj"});
  for (const AdapterSpec* one : {static_cast<const AdapterSpec*>(nullptr), &lora}) {
    const auto blocks = list_parameters(spec, one);
    const Parameter& scalar = blocks[2].frozen.back();
    EXPECT_EQ(scalar.name, "layers.1.scalar");
    EXPECT_EQ(scalar.kind, ParameterKind::kBuffer);
    EXPECT_EQ(scalar.parts.at(0).name, "model.layers.1.layer_scalar");
    EXPECT_EQ(scalar.shape(scalar.parts[0]), (std::vector<int64_t>{1}));
    EXPECT_EQ(blocks[2].frozen.size(),
              one == nullptr ? 1U : 1 + list_parameters(spec, nullptr)[2].trainable.size());
    const ModelLayout layout = make_layout(spec, one, DType::kBF16, &encoding_of(EncodingKind::kNf4));
    const TensorPlace* const place = layout.blocks[2].find("layers.1.scalar");
    ASSERT_NE(place, nullptr);
    EXPECT_TRUE(place->frozen);
    EXPECT_FALSE(place->encoded());
    EXPECT_EQ(place->pieces.front().bytes, 2);
    if (one == nullptr) {
      EXPECT_EQ(layout.blocks[2].frozen_elements, 1);
      EXPECT_EQ(layout.blocks[2].frozen_bytes, 512);
      EXPECT_EQ(layout.frozen_elements, 2);
      const std::vector<Unit> units = layout.units(true);
      EXPECT_TRUE(units[2].holds(*place));
      EXPECT_EQ(units[2].elements, layout.blocks[2].flat_elements);
      EXPECT_EQ(units[0].frozen_bytes, 0);
    }
  }
}

TEST(Parameters, WhatHasNoWeightHasNoParameter) {
  const auto blocks = list_parameters(gemma4(), nullptr);
  EXPECT_EQ(names(blocks[2].trainable),
            (std::vector<std::string>{"layers.1.attn.qkv", "layers.1.attn.out", "layers.1.mlp.gate_up",
                                      "layers.1.mlp.down", "layers.1.attn.norm", "layers.1.attn.norm_after",
                                      "layers.1.mlp.norm", "layers.1.mlp.norm_after", "layers.1.attn.q_norm",
                                      "layers.1.attn.k_norm"}));
  // Values are keys in the second layer.
  EXPECT_EQ(find(blocks[1].trainable, "layers.0.attn.qkv").rows, 2 * 4 + 4 + 4);
  EXPECT_EQ(find(blocks[2].trainable, "layers.1.attn.qkv").rows, 2 * 6 + 6);
  EXPECT_EQ(find(blocks[2].trainable, "layers.1.attn.qkv").parts.size(), 2U);
  EXPECT_EQ(find(blocks[2].trainable, "layers.1.attn.q_norm").rows, 6);
  ModelSpec plain = gemma4();
  plain.final_norm.kind = NormKind::kRmsPlain;
  EXPECT_TRUE(list_parameters(plain, nullptr).back().trainable.empty());
}

TEST(Parameters, AMixerBesideAnotherOneHasNoNorm) {
  const ModelSpec cohere = parse(R"({"model_type": "cohere", "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 30})");
  EXPECT_EQ(names(list_parameters(cohere, nullptr)[1].trainable),
            (std::vector<std::string>{"layers.0.attn.qkv", "layers.0.attn.out", "layers.0.mlp.gate_up",
                                      "layers.0.mlp.down", "layers.0.attn.norm"}));
}

TEST(Parameters, NormsOfEachHeadsOwnAreAMatrixInTheFiles) {
  const ModelSpec plus = parse(R"({"model_type": "cohere", "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "use_qk_norm": true, "vocab_size": 30})");
  const auto blocks = list_parameters(plus, nullptr);
  using Shape = std::vector<int64_t>;
  for (const auto& [name, heads] : {std::pair("q_norm", 2), std::pair("k_norm", 1)}) {
    const Parameter& norm = find(blocks[1].trainable, std::string("layers.0.attn.") + name);
    EXPECT_EQ((Shape{norm.rows, norm.columns}), (Shape{heads * 4, 1}));
    EXPECT_EQ(norm.shape(norm.parts[0]), (Shape{heads, 4}));
  }
}

TEST(Parameters, ANormOfAllHeadsHasAWeightOfTheirWidth) {
  const ModelSpec olmo2 = parse(R"({"model_type": "olmo2", "hidden_size": 8, "intermediate_size": 12,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 30})");
  const auto blocks = list_parameters(olmo2, nullptr);
  EXPECT_EQ(find(blocks[1].trainable, "layers.0.attn.q_norm").rows, 8);
  EXPECT_EQ(find(blocks[1].trainable, "layers.0.attn.k_norm").rows, 4);
  EXPECT_EQ(find(blocks[1].trainable, "layers.0.attn.norm_after").parts[0].name,
            "model.layers.0.post_attention_layernorm.weight");
}

}  // namespace
}  // namespace lm
