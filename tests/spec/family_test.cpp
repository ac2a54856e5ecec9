// What families read beside Llama's keys. families_test.py compares all of it with transformers' classes.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/spec/family_configs.h"

namespace lm {
namespace {

using nlohmann::json;
using Scaling = RopeSpec::Scaling;

std::vector<int64_t> windows(const ModelSpec& spec) {
  std::vector<int64_t> out;
  for (const LayerSpec& layer : spec.layers) out.push_back(layer.attention().window);
  return out;
}
std::vector<int> tables(const ModelSpec& spec) {
  std::vector<int> out;
  for (const LayerSpec& layer : spec.layers) out.push_back(layer.attention().rope);
  return out;
}

// ---- Files that hold the model inside another one

TEST(Wrapped, TheTextsKeysCountAndTheClassFillsThem) {
  const json text = {{"hidden_size", 2560}, {"num_hidden_layers", 34}, {"sliding_window", 1024}};
  const json file = {{"model_type", "gemma3"},
                     {"hidden_size", 7},  // nobody's
                     {"architectures", {"Gemma3ForConditionalGeneration"}},
                     {"text_config", text}};
  const ModelSpec spec = parse(file);
  EXPECT_EQ(spec.model_type, "gemma3_text");
  EXPECT_EQ(spec.wrapper, "gemma3");
  EXPECT_EQ(spec.architecture, "Gemma3ForConditionalGeneration");
  EXPECT_EQ(spec.hidden, 2560);
  EXPECT_EQ(spec.vocab, 262208);
  EXPECT_EQ(spec.layer_count(), 34);
  EXPECT_EQ(spec.layer(0).mlp().ffn, 9216);
  EXPECT_EQ(spec.layer(0).attention().heads, 8);
  EXPECT_EQ(spec.layer(0).attention().kv_heads, 4);
  EXPECT_EQ(spec.layer(0).attention().head_dim, 256);
  EXPECT_EQ(spec.layer(0).attention().window, 1024);
  EXPECT_TRUE(spec.tied);
  EXPECT_EQ(std::string(spec.names.embedding), "model.embed_tokens");
  // The class of the text alone names the same model; a file of that alone has to name its sizes.
  EXPECT_EQ(parse(with(file, "architectures", {"Gemma3ForCausalLM"})).hidden, 2560);
  expect_refused(with(file, "architectures", {"GemmaForCausalLM"}), "Gemma3ForConditionalGeneration");
  EXPECT_EQ(parse(small("gemma3_text")).wrapper, "");
  json alone = text;
  alone["model_type"] = "gemma3_text";
  expect_refused(alone, "intermediate_size is missing");
}

TEST(Wrapped, MessagesNameTheTextsKeys) {
  json file = {{"model_type", "mistral3"}, {"text_config", small("mistral")}};
  file["text_config"]["num_key_value_heads"] = 3;
  expect_refused(file, "text_config.num_key_value_heads");
  file["text_config"] = small("mistral");
  file["text_config"]["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 0}};
  expect_refused(file, "text_config.rope_scaling.factor");
  file["text_config"] = small("llama");
  expect_refused(file, "text_config.model_type = \"llama\" is not supported in mistral3");
  file.erase("text_config");
  expect_refused(file, "text_config is missing");
  file["text_config"] = 7;
  expect_refused(file, "text_config must be an object");
  expect_refused(json{{"model_type", "gemma5"}}, "gemma3");
}

TEST(Wrapped, TyingIsReadAtTheTopThenInTheText) {
  json file = {{"model_type", "mistral3"}, {"text_config", small("mistral")}};
  EXPECT_TRUE(parse(file).tied);
  file["tie_word_embeddings"] = false;
  EXPECT_FALSE(parse(file).tied);
  file["tie_word_embeddings"] = true;
  file["text_config"]["tie_word_embeddings"] = false;
  EXPECT_TRUE(parse(file).tied);
  file.erase("tie_word_embeddings");
  file["text_config"].erase("tie_word_embeddings");
  EXPECT_FALSE(parse(file).tied);  // as published files of line 4 mean it
  file["quantization_config"] = {{"quant_method", "fp8"}};
  expect_refused(file, "quantization_config");
  file["quantization_config"] = {{"quant_method", "bitsandbytes"}, {"load_in_8bit", true}};
  EXPECT_EQ(parse(file).stored, EncodingKind::kInt8);
}

TEST(Wrapped, ItsTextMayBeOfSeveralFamilies) {
  json file = {{"model_type", "mistral3"}, {"text_config", small("ministral3")}};
  EXPECT_EQ(parse(file).model_type, "ministral3");
  EXPECT_EQ(parse(file).wrapper, "mistral3");
  file["text_config"].erase("model_type");
  EXPECT_EQ(parse(file).model_type, "mistral");
}

// ---- Keys by other names

TEST(Aliases, AreReadAndNamed) {
  const ModelSpec spec = parse(with(gpt2(), "layer_norm_epsilon", 1e-3));
  EXPECT_EQ(spec.hidden, 64);
  EXPECT_EQ(spec.layer_count(), 3);
  EXPECT_EQ(spec.layer(0).attention().kv_heads, 4);
  EXPECT_EQ(spec.layer(0).find<PlainMlpSpec>()->ffn, 256);
  EXPECT_EQ(spec.final_norm.eps, 1e-3);
  EXPECT_EQ(parse(with(gpt2(), "n_inner", 70)).layer(0).find<PlainMlpSpec>()->ffn, 70);
  json without = gpt2();
  without.erase("n_embd");
  without["hidden_size"] = 64;  // not its key
  expect_refused(without, "n_embd is missing");
  expect_refused(with(gpt2(), "n_head", 5), "n_embd = 64 is not a multiple of");
  expect_refused(with(gpt2(), "layer_norm_epsilon", 2), "layer_norm_epsilon must be");
  expect_refused(with(small("starcoder2"), "norm_epsilon", "x"), "norm_epsilon must be a number");
  expect_refused(with(small("nemotron"), "norm_eps", {{"__float__", "Infinity"}}), "norm_eps must be finite");
  EXPECT_EQ(parse(with(small("cohere"), "layer_norm_eps", 0.5)).final_norm.eps, 0.5);
  EXPECT_EQ(parse(with(small("cohere"), "rms_norm_eps", 0.5)).final_norm.eps, 1e-5);
}

TEST(Gpt2, PositionsAreATableOfThatManyRows) {
  const ModelSpec spec = parse(with(gpt2(), "n_positions", 50));
  EXPECT_EQ(spec.embedding.positions, 50);
  EXPECT_EQ(spec.longest_text(), 50);
  EXPECT_TRUE(spec.ropes.empty());
  EXPECT_EQ(tables(spec), std::vector<int>(3, AttentionSpec::kNoRope));
  EXPECT_EQ(parse(gpt2()).embedding.positions, 1024);
  expect_refused(with(gpt2(), "n_positions", int64_t{1} << 25), "n_positions");
}

TEST(Gpt2, ScoresMayBeScaledByTheLayer) {
  EXPECT_EQ(parse(gpt2()).layer(2).attention().scale(), 0.25F);
  EXPECT_EQ(parse(with(gpt2(), "scale_attn_weights", false)).layer(2).attention().scale(), 1.F);
  const ModelSpec spec = parse(with(gpt2(), "scale_attn_by_inverse_layer_idx", true));
  for (int64_t i = 0; i < 3; ++i)
    EXPECT_FLOAT_EQ(spec.layer(i).attention().scale(), 0.25F / static_cast<float>(i + 1));
}

// ---- Activations

TEST(Activations, AreReadByTheFamilysKeyAndWords) {
  const auto of = [](const json& config) { return parse(config).layer(0).mlp().activation; };
  EXPECT_EQ(of(small("gemma")), Activation::kGeluTanh);
  EXPECT_EQ(of(with(small("gemma"), "hidden_act", "gelu")), Activation::kGeluTanh);
  EXPECT_EQ(of(with(small("gemma"), "hidden_activation", "silu")), Activation::kGeluTanh);  // not its key
  expect_refused(with(small("gemma"), "hidden_act", "silu"), "hidden_act");
  EXPECT_EQ(of(with(small("gemma2"), "hidden_act", "silu")), Activation::kGeluTanh);
  expect_refused(with(small("gemma2"), "hidden_activation", "gelu"), "hidden_activation");
  expect_refused(with(small("phi3"), "hidden_act", "gelu"), "hidden_act");
  EXPECT_EQ(parse(small("arcee")).layer(0).find<PlainMlpSpec>()->activation, Activation::kRelu2);
  expect_refused(with(small("nemotron"), "hidden_act", "silu"), "only relu2");
}

// ---- RoPE

json longrope() {
  return {{"type", "longrope"},
          {"short_factor", {1, 1, 1, 1, 1, 1, 1, 1}},
          {"long_factor", {2, 2, 2, 2, 3, 3, 3, 3}}};
}

TEST(Ropes, Phi3sOriginalPositionsStandBesideItsTable) {
  json config = with(small("phi3"), "max_position_embeddings", 4096 * 32);
  for (const char* word : {"longrope", "su", "yarn"}) {
    config["rope_scaling"] = longrope();
    config["rope_scaling"]["type"] = word;
    const RopeSpec rope = parse(config).ropes.at(0);
    EXPECT_EQ(rope.scaling, Scaling::kLongRope);
    EXPECT_EQ(rope.original_max_position, 4096);
    EXPECT_NEAR(rope.attention_factor, 1.1902380714, 1e-9);
    EXPECT_NE(rope_frequencies(rope, 4097), rope_frequencies(rope, 4096));
    EXPECT_EQ(rope_frequencies(rope, 4097)[0], 0.5F);
  }
  config["rope_scaling"]["original_max_position_embeddings"] = 77;  // the class's own wins
  EXPECT_EQ(parse(config).ropes.at(0).original_max_position, 4096);
  EXPECT_EQ(parse(config).longest_text(), 4096 * 32);
  config["original_max_position_embeddings"] = 1024;
  EXPECT_EQ(parse(config).ropes.at(0).original_max_position, 1024);
  config["rope_scaling"]["short_factor"].push_back(1);
  expect_refused(config, "rope_scaling.short_factor must be a list with one number for each of the 8");
  config["rope_scaling"] = {{"type", "linear"}, {"factor", 2}};
  expect_refused(config, "(supported: default, longrope)");
  config["rope_scaling"] = longrope();
  config["partial_rotary_factor"] = 0.5;
  expect_refused(config, "each of the 4");
  // Another family takes what the table says.
  json llama = with(small("llama"), "rope_scaling", longrope());
  llama["rope_scaling"]["original_max_position_embeddings"] = 77;
  EXPECT_EQ(parse(llama).ropes.at(0).original_max_position, 77);
  llama["rope_scaling"]["type"] = "su";
  expect_refused(llama, "rope_scaling.type = \"su\" is not supported");
}

TEST(Ropes, APartOfAHeadIsTurnedWhereTheFamilyKnowsIt) {
  EXPECT_EQ(parse(small("nemotron")).ropes.at(0).dim, 8);
  EXPECT_EQ(parse(small("phi3")).ropes.at(0).dim, 16);
  json config = with(small("glm"), "head_dim", 16);
  EXPECT_EQ(parse(config).ropes.at(0).dim, 8);
  EXPECT_TRUE(parse(config).ropes.at(0).neighbours);
  config["partial_rotary_factor"] = 0.25;
  EXPECT_EQ(parse(config).ropes.at(0).dim, 4);
  config["rope_parameters"] = {{"partial_rotary_factor", 0.75}, {"rope_theta", 7.0}};
  EXPECT_EQ(parse(config).ropes.at(0).dim, 12);
  EXPECT_EQ(parse(config).ropes.at(0).theta, 7.0);
  config["rope_parameters"]["partial_rotary_factor"] = 0.2;  // 3 features
  expect_refused(config, "partial_rotary_factor");
  expect_refused(with(small("llama"), "partial_rotary_factor", 0.5), "partial_rotary_factor");
  expect_refused(with(small("llama"), "rope_parameters", {{"partial_rotary_factor", 0.5}}),
                 "rope_parameters.partial_rotary_factor");
}

TEST(Ropes, KindsOfLayersHaveTheirTables) {
  json config = with(small("gemma3_text"), "sliding_window_pattern", 3);
  config["rope_theta"] = 5e5;
  config["rope_local_base_freq"] = 2e4;
  config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 8.0}};
  const ModelSpec old = parse(config);
  EXPECT_EQ(windows(old), (std::vector<int64_t>{4096, 4096, 0, 4096, 4096, 0}));
  EXPECT_EQ(tables(old), (std::vector<int>{1, 1, 0, 1, 1, 0}));
  EXPECT_EQ(old.ropes.at(0).theta, 5e5);
  EXPECT_EQ(old.ropes.at(0).factor, 8);
  EXPECT_EQ(old.ropes.at(1).theta, 2e4);
  EXPECT_EQ(old.ropes.at(1).scaling, Scaling::kNone);
  for (const char* key : {"rope_theta", "rope_local_base_freq", "rope_scaling"}) config.erase(key);
  config["rope_parameters"] = {
      {"full_attention", {{"rope_type", "linear"}, {"factor", 8.0}, {"rope_theta", 5e5}}},
      {"sliding_attention", {{"rope_theta", 2e4}}}};
  EXPECT_EQ(parse(config).ropes, old.ropes);
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 5e5}};
  expect_refused(config, "must have an entry for each kind of layer");
  config.erase("rope_parameters");
  EXPECT_EQ(parse(config).ropes.at(0).theta, 1e6);
  EXPECT_EQ(parse(config).ropes.at(1).theta, 1e4);
  config["layer_types"] = std::vector<std::string>(6, "sliding_attention");  // one kind: one table
  EXPECT_EQ(parse(config).ropes.size(), 1U);
  EXPECT_EQ(tables(parse(config)), std::vector<int>(6, 0));
}

TEST(Ropes, Olmo3sThetaBesideTheTablesIsThatOfFullAttention) {
  json config = with(small("olmo3"), "rope_theta", 7e4);
  config["rope_scaling"] = {
      {"rope_type", "yarn"}, {"factor", 8.0}, {"original_max_position_embeddings", 512}};
  const ModelSpec spec = parse(config);
  EXPECT_EQ(tables(spec), (std::vector<int>{1, 1, 1, 0, 1, 1}));
  EXPECT_EQ(spec.ropes.at(0).theta, 7e4);
  EXPECT_EQ(spec.ropes.at(0).scaling, Scaling::kYarn);
  EXPECT_EQ(spec.ropes.at(1).theta, 5e5);
  EXPECT_EQ(spec.ropes.at(1).scaling, Scaling::kNone);
  config["rope_scaling"]["truncate"] = false;
  expect_refused(config, "truncate");
}

TEST(Ropes, SomeLayersKnowNoPositions) {
  EXPECT_EQ(tables(parse(small("cohere2"))), (std::vector<int>{0, 0, 0, -1, 0, 0}));
  EXPECT_EQ(tables(parse(small("exaone4"))), (std::vector<int>{0, 0, 0, -1, 0, 0}));
  json config = with(small("exaone4"), "sliding_window", nullptr);
  EXPECT_EQ(tables(parse(config)), std::vector<int>(6, 0));
  EXPECT_EQ(windows(parse(config)), std::vector<int64_t>(6, 0));
  expect_refused(with(small("cohere2"), "sliding_window", nullptr), "sliding_window is null");
  config = small("granitemoehybrid");
  config["shared_intermediate_size"] = 32;
  config["num_local_experts"] = 0;
  config["layer_types"] = std::vector<std::string>(6, "attention");
  EXPECT_TRUE(parse(config).ropes.empty());
  EXPECT_EQ(parse(config).layer(0).mlp().ffn, 32);
  config["position_embedding_type"] = "rope";
  EXPECT_EQ(tables(parse(config)), std::vector<int>(6, 0));
  config["position_embedding_type"] = "alibi";
  expect_refused(config, "position_embedding_type");
}

TEST(Ropes, Ministral3ScalesQueriesByTheirPosition) {
  const AttentionSpec assumed = parse(small("ministral3")).layer(0).attention();
  EXPECT_EQ(assumed.position_slope, 0.1);
  EXPECT_EQ(assumed.position_period, 16384);
  EXPECT_EQ(parse(small("ministral3")).ropes.at(0).attention_factor, 1);
  json config = small("ministral3");
  config["rope_parameters"] = {{"rope_type", "yarn"},
                               {"factor", 4.0},
                               {"original_max_position_embeddings", 16},
                               {"llama_4_scaling_beta", 0.5}};
  EXPECT_EQ(parse(config).layer(5).attention().position_period, 16);
  EXPECT_EQ(parse(config).layer(5).attention().position_slope, 0.5);
  EXPECT_GT(parse(config).ropes.at(0).attention_factor, 1);
  config["rope_parameters"].erase("llama_4_scaling_beta");
  expect_refused(config, "rope_parameters.llama_4_scaling_beta is missing");
}

TEST(Ropes, YarnsFactorOfCosinesIsGivenOrFollowsFromItsOthers) {
  json config = with(small("llama"), "rope_scaling", {{"rope_type", "yarn"}, {"factor", 40.0}});
  json& yarn = config["rope_scaling"];
  const auto factor = [&] { return parse(config).ropes.at(0).attention_factor; };
  EXPECT_DOUBLE_EQ(factor(), 0.1 * std::log(40.0) + 1);
  yarn["mscale"] = 0.5;  // alone it says nothing
  EXPECT_DOUBLE_EQ(factor(), 0.1 * std::log(40.0) + 1);
  yarn["mscale_all_dim"] = 0.5;
  EXPECT_EQ(factor(), 1);
  yarn["attention_factor"] = 1.25;
  EXPECT_EQ(factor(), 1.25);
  yarn["factor"] = nullptr;  // the ratio of positions
  yarn["original_max_position_embeddings"] = 512;
  EXPECT_EQ(parse(config).ropes.at(0).factor, 4);
  EXPECT_EQ(parse(config).longest_text(), 2048);
  yarn.erase("factor");
  expect_refused(config, "rope_scaling.factor is missing");
  yarn["factor"] = 2.0;
  yarn["beta_fast"] = 0;  // counts as missing
  EXPECT_EQ(parse(config).ropes.at(0).beta_fast, 32);
  config["rope_theta"] = 1;
  expect_refused(config, "rope_theta");
}

// ---- Gemma 4

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
  config.erase("hidden_size_per_layer_input");
  expect_refused(config, "hidden_size_per_layer_input");
  expect_refused(with(gemma4(), "enable_moe_block", true), "enable_moe_block");
  expect_refused(with(gemma4(), "num_kv_shared_layers", 2), "num_kv_shared_layers");
  expect_refused(with(gemma4(), "use_bidirectional_attention", "all"), "use_bidirectional_attention");
  expect_refused(with(gemma4(), "rope_scaling", {{"rope_type", "linear"}}), "rope_scaling");
  expect_refused(with(gemma4(), "rope_parameters", {{"full_attention", {{"rope_theta", 1e6}}}}),
                 "rope_parameters.sliding_attention is missing");
  EXPECT_EQ(parse(with(gemma4(), "use_bidirectional_attention", "vision")).hidden, 64);
  config["model_type"] = "gemma4_unified_text";  // it has no such inputs
  EXPECT_EQ(windows(parse(config)).front(), 1024);
}

// ---- Factors and caps

TEST(Factors, AreTheFamilys) {
  json granite = small("granite");
  EXPECT_EQ(parse(granite).layer(0).attention().scale(), 1.F);  // not 1 / sqrt(16)
  granite["attention_multiplier"] = 0.125;
  granite["embedding_multiplier"] = 12;
  granite["logits_scaling"] = 8;
  granite["residual_multiplier"] = 0.22;
  const ModelSpec spec = parse(granite);
  EXPECT_EQ(spec.layer(0).attention().scale(), 0.125F);
  EXPECT_EQ(spec.embedding.scale, 12);
  EXPECT_FALSE(spec.embedding.round_scale);
  EXPECT_EQ(spec.head.logit_scale, 0.125);
  for (const SublayerSpec& sublayer : spec.layer(5).sublayers) EXPECT_EQ(sublayer.residual_scale, 0.22);
  expect_refused(with(granite, "logits_scaling", 0), "logits_scaling");
  EXPECT_EQ(parse(small("cohere")).head.logit_scale, 0.0625);
  EXPECT_EQ(parse(small("gemma")).embedding.scale, 8);
  EXPECT_TRUE(parse(small("gemma")).embedding.round_scale);
}

TEST(Factors, CapsMayBeSwitchedOff) {
  const ModelSpec gemma2 = parse(small("gemma2"));
  EXPECT_EQ(gemma2.layer(0).attention().softcap, 50);
  EXPECT_EQ(gemma2.head.logit_cap, 30);
  EXPECT_EQ(gemma2.layer(0).attention().scale(), 0.0625F);
  json config = small("gemma2");
  config["attn_logit_softcapping"] = config["final_logit_softcapping"] = nullptr;
  EXPECT_EQ(parse(config).layer(0).attention().softcap, 0);
  EXPECT_EQ(parse(config).head.logit_cap, 0);
  config["attn_logit_softcapping"] = 0;
  expect_refused(config, "attn_logit_softcapping");
  expect_refused(with(small("gemma3_text"), "attn_logit_softcapping", 50), "attn_logit_softcapping");
  config = with(small("gemma3_text"), "final_logit_softcapping", 30);
  EXPECT_EQ(parse(config).head.logit_cap, 30);
  EXPECT_EQ(parse({{"model_type", "gemma3"}, {"text_config", config}}).head.logit_cap, 0);
}

TEST(Shapes, OfBlocksAreTheFamilys) {
  const auto norms = [](const std::string& type) {
    std::vector<std::pair<bool, bool>> out;
    const ModelSpec spec = parse(small(type));
    for (const SublayerSpec& sublayer : spec.layer(0).sublayers)
      out.emplace_back(sublayer.norm.has_value(), sublayer.norm_after.has_value());
    return out;
  };
  using Norms = std::vector<std::pair<bool, bool>>;
  for (const char* type : {"phi3", "granite", "glm", "starcoder2", "nemotron", "gemma"})
    EXPECT_EQ(norms(type), (Norms{{true, false}, {true, false}})) << type;
  for (const char* type : {"gemma2", "gemma3_text", "glm4"})
    EXPECT_EQ(norms(type), (Norms{{true, true}, {true, true}})) << type;
  for (const char* type : {"olmo2", "olmo3", "exaone4"})
    EXPECT_EQ(norms(type), (Norms{{false, true}, {false, true}})) << type;
  EXPECT_EQ(norms("cohere"), (Norms{{true, false}, {false, false}}));
  EXPECT_TRUE(parse(small("cohere")).layer(0).sublayers[1].beside);
  EXPECT_FALSE(parse(small("cohere")).layer(0).sublayers[0].beside);
  EXPECT_TRUE(parse(small("olmo2")).layer(0).attention().joint_norm);
  EXPECT_FALSE(parse(small("exaone4")).layer(0).attention().joint_norm);
  EXPECT_EQ(parse(small("nemotron")).final_norm.kind, NormKind::kLayerOffset);
  EXPECT_EQ(parse(small("cohere2")).final_norm.kind, NormKind::kLayerNoBias);
  EXPECT_EQ(parse(small("gemma3_text")).layer(0).attention().head_norm->kind, NormKind::kRmsOffset);
  const auto own_norms = [](const json& config) {
    const AttentionSpec& attention = parse(config).layer(0).attention();
    return attention.head_norm.has_value() && attention.own_norms;
  };
  EXPECT_FALSE(own_norms(small("cohere")));
  EXPECT_TRUE(own_norms(with(small("cohere"), "use_qk_norm", true)));
  expect_refused(with(small("cohere2"), "use_qk_norm", true), "use_qk_norm");
}

}  // namespace
}  // namespace lm
