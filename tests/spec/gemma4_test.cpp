// What Gemma 4's files say of layers without a window, of borrowed keys and of layers' inputs.
#include "family_files.h"
#include "spec/adapter_sites.h"
#include "spec/parameter.h"

namespace lm {
namespace {

using namespace family_files;
using Scaling = RopeSpec::Scaling;

json gemma4() {
  json out = with(small("gemma4_text"), "hidden_size_per_layer_input", 0);
  out["head_dim"] = 32;
  return out;
}

TEST(Gemma4, LayersWithoutAWindowHaveHeadsOfTheirOwn) {
  json config = with(gemma4(), "num_global_key_value_heads", 1);
  ModelSpec spec = parse(config);
  EXPECT_EQ(windows(spec), (std::vector<int64_t>{512, 512, 512, 512, 512, 0}));
  EXPECT_EQ(spec.layer(0).attention().head_dim, 32);
  EXPECT_EQ(spec.layer(5).attention().head_dim, 512);
  EXPECT_EQ(spec.layer(5).attention().kv_heads, 2);  // only where values are keys
  EXPECT_FALSE(spec.layer(5).attention().values_are_keys);
  config["attention_k_eq_v"] = true;
  config["global_head_dim"] = 64;
  spec = parse(config);
  EXPECT_EQ(spec.layer(5).attention().head_dim, 64);
  EXPECT_EQ(spec.layer(5).attention().kv_heads, 1);
  EXPECT_TRUE(spec.layer(5).attention().values_are_keys);
  EXPECT_FALSE(spec.layer(0).attention().values_are_keys);
  EXPECT_EQ(spec.ropes.at(0).dim, 64);
  EXPECT_EQ(spec.ropes.at(0).scaling, Scaling::kProportional);
  EXPECT_EQ(spec.ropes.at(0).turned, 8);
  EXPECT_EQ(spec.ropes.at(1).dim, 32);
  EXPECT_TRUE(spec.layer(3).scalar);
  EXPECT_EQ(spec.layer(3).attention().scale(), 1.F);
  EXPECT_EQ(spec.layer(3).attention().value_norm->kind, NormKind::kRmsPlain);
  config["layer_types"] = std::vector<std::string>(6, "sliding_attention");
  EXPECT_EQ(windows(parse(config)).back(), 0);
}

TEST(Gemma4, TheNewerFormNamesLayersByNumber) {
  json config = with(gemma4(), "attention_k_eq_v", true);
  config["per_layer_config"] = {{"5", {{"head_dim", 64}, {"num_key_value_heads", 1}}}};
  const ModelSpec spec = parse(config);
  EXPECT_EQ(spec.layer(5).attention().head_dim, 64);
  EXPECT_EQ(spec.layer(5).attention().kv_heads, 1);
  EXPECT_EQ(spec.layer(4).attention().head_dim, 32);
  config["global_head_dim"] = 512;  // of the older form, and then nobody's
  EXPECT_EQ(parse(config).layer(5).attention().head_dim, 64);
  for (const json& bad :
       {json{{"6", json::object()}}, json{{"x", json::object()}}, json{{"05x", json::object()}}, json(7),
        json{{"5", 7}}, json{{"5", {{"hidden_size", 7}}}}, json{{"5", {{"num_key_value_heads", 3}}}}}) {
    config["per_layer_config"] = bad;
    expect_refused(config, "per_layer_config");
  }
  config["per_layer_config"] = {{"2", {{"head_dim", 64}}}};  // one table serves all layers with a window
  expect_refused(config, "head_dim");
}

TEST(Gemma4, WhatOtherSizesHaveIsRefusedByName) {
  json config = gemma4();
  expect_refused(with(gemma4(), "use_bidirectional_attention", "all"), "use_bidirectional_attention");
  expect_refused(with(gemma4(), "rope_scaling", {{"rope_type", "linear"}}), "rope_scaling");
  expect_refused(with(gemma4(), "rope_parameters", {{"full_attention", {{"rope_theta", 1e6}}}}),
                 "rope_parameters.sliding_attention is missing");
  EXPECT_EQ(parse(with(gemma4(), "use_bidirectional_attention", "vision")).hidden, 64);
  config["model_type"] = "gemma4_unified_text";  // it has no such inputs
  EXPECT_EQ(windows(parse(config)).front(), 1024);
}

TEST(Gemma4, ExpertsStandBesideEachMlp) {
  json config = gemma4();
  config.update(
      {{"enable_moe_block", true}, {"num_experts", 8}, {"top_k_experts", 3}, {"moe_intermediate_size", 40}});
  const ModelSpec spec = parse(config);
  const NormSpec norm{.kind = NormKind::kRmsLate, .eps = spec.final_norm.eps};
  for (const LayerSpec& layer : spec.layers) {
    ASSERT_EQ(layer.sublayers.size(), 3U);
    EXPECT_EQ(layer.mlp().ffn, 96);
    const SublayerSpec &mlp = layer.sublayers[1], &beside = layer.sublayers[2];
    EXPECT_TRUE(mlp.norm == norm && mlp.norm_after == norm && mlp.norm_joined == norm && !mlp.beside);
    EXPECT_TRUE(!beside.norm && beside.norm_after == norm && !beside.norm_joined && beside.beside);
    EXPECT_EQ(*layer.find<ExpertsSpec>(),
              (ExpertsSpec{.activation = Activation::kGeluTanh,
                           .experts = 8,
                           .chosen = 3,
                           .ffn = 40,
                           .renormalise = true,
                           .input_norm = norm,
                           .router_norm = NormSpec{.kind = NormKind::kRms, .eps = norm.eps},
                           .factors = true}));
  }
  EXPECT_EQ(resolve_targets(spec.names, {"all-linear"}, "x"),
            (std::vector<std::string>{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                                      "mlp.down_proj"}));
  EXPECT_EQ(resolve_targets(spec.names, {"down_proj"}, "x"), std::vector<std::string>{"mlp.down_proj"});
  // peft converts nothing of this family: its names are those of the MLP.
  for (const AdapterModule& module : adapter_modules(spec))
    EXPECT_FALSE(peft_takes_for_experts(spec, module)) << module.path;
  for (const char* key : {"num_experts", "top_k_experts", "moe_intermediate_size"})
    expect_refused(with(config, key, nullptr), key);
  expect_refused(with(config, "top_k_experts", 9), "top_k_experts");
  config["model_type"] = "gemma4_unified_text";
  expect_refused(config, "enable_moe_block");
  config = with(gemma4(), "enable_moe_block", false);
  EXPECT_EQ(parse(config).layer(0).sublayers.size(), 2U);
  EXPECT_EQ(parse(config).layer(0).find<ExpertsSpec>(), nullptr);
}

TEST(Gemma4, TheLastLayersReadTheKeysOfTheLastOneOfTheirKindBeforeThem) {
  json config = with(gemma4(), "num_kv_shared_layers", 3);
  config["attention_k_eq_v"] = true;
  config["layer_types"] = {"full_attention",    "sliding_attention", "sliding_attention",
                           "sliding_attention", "full_attention",    "full_attention"};
  ModelSpec spec = parse(config);
  const auto source = [&](int64_t i) { return spec.layer(i).attention().source; };
  EXPECT_EQ(source(2), -1);
  EXPECT_EQ(source(3), 2);
  EXPECT_EQ(source(4), 0);
  EXPECT_EQ(source(5), 0);
  EXPECT_TRUE(spec.layer(0).attention().lends && spec.layer(2).attention().lends);
  EXPECT_FALSE(spec.layer(1).attention().lends || spec.layer(4).attention().lends);
  EXPECT_EQ(spec.layer(4).attention().projected_rows(), spec.layer(4).attention().q_rows());
  EXPECT_FALSE(spec.layer(4).attention().values_are_keys || spec.layer(4).attention().value_norm);
  EXPECT_EQ(spec.layer(4).mlp().ffn, spec.layer(0).mlp().ffn);
  config["use_double_wide_mlp"] = true;
  spec = parse(config);
  EXPECT_EQ(spec.layer(3).mlp().ffn, 2 * spec.layer(2).mlp().ffn);
  expect_refused(with(config, "num_kv_shared_layers", 6), "num_kv_shared_layers");
  config["layer_types"] = {"sliding_attention", "sliding_attention", "sliding_attention",
                           "sliding_attention", "full_attention",    "full_attention"};
  expect_refused(config, "num_kv_shared_layers");  // nobody before them has keys without a window
  config = with(gemma4(), "num_kv_shared_layers", 1);
  config["layer_types"] = {"full_attention",    "sliding_attention", "sliding_attention",
                           "sliding_attention", "sliding_attention", "full_attention"};
  config["per_layer_config"] = {{"0", {{"head_dim", 64}, {"num_key_value_heads", 1}}},
                                {"5", {{"head_dim", 64}}}};
  expect_refused(config, "num_kv_shared_layers");  // their heads differ
}

TEST(Gemma4, LayersMayHaveInputsOfTheirOwn) {
  json config = gemma4();
  config.erase("hidden_size_per_layer_input");  // 256, and a table of 262144 rows
  config["vocab_size"] = 1000;
  ModelSpec spec = parse(config);
  EXPECT_EQ(spec.embedding.inputs.all(), 6 * 256);
  EXPECT_EQ(spec.embedding.inputs.vocab, 262144);
  EXPECT_EQ(spec.layer(5).sublayers.size(), 3U);
  EXPECT_EQ(spec.layer(5).find<LayerInputSpec>()->width, 256);
  EXPECT_FALSE(spec.layer(5).sublayers[2].norm.has_value());
  EXPECT_TRUE(spec.layer(5).sublayers[2].norm_after.has_value());
  config["vocab_size_per_layer_input"] = spec.vocab - 1;
  expect_refused(config, "vocab_size_per_layer_input");
  config["hidden_size_per_layer_input"] = nullptr;  // as 0
  EXPECT_EQ(parse(config).embedding.inputs.width, 0);
  EXPECT_EQ(parse(config).layer(0).sublayers.size(), 2U);
}

}  // namespace
}  // namespace lm
