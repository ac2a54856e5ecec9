#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "spec/model_spec.h"

namespace lm {
namespace {

using nlohmann::json;

json llama() {
  return {{"model_type", "llama"},     {"architectures", {"LlamaForCausalLM"}},
          {"hidden_size", 2048},       {"intermediate_size", 8192},
          {"num_hidden_layers", 2},    {"num_attention_heads", 32},
          {"num_key_value_heads", 8},  {"vocab_size", 128256},
          {"rms_norm_eps", 1e-5},      {"rope_theta", 500000.0},
          {"hidden_act", "silu"},      {"max_position_embeddings", 131072},
          {"torch_dtype", "bfloat16"}, {"tie_word_embeddings", true}};
}

json llama3_scaling(double factor) {
  return {{"rope_type", "llama3"},
          {"factor", factor},
          {"low_freq_factor", 1.0},
          {"high_freq_factor", 4.0},
          {"original_max_position_embeddings", 8192}};
}

json family(const std::string& type) {
  json config = llama();
  config["model_type"] = type;
  std::string architecture = type + "ForCausalLM";
  architecture[0] = static_cast<char>(std::toupper(architecture[0]));
  config["architectures"] = {architecture};
  return config;
}

ModelSpec parse(const json& config) {
  return parse_model_spec(config.dump(), "config.json");
}

std::vector<int64_t> windows(const ModelSpec& spec) {
  std::vector<int64_t> out;
  for (const LayerSpec& layer : spec.layers) out.push_back(layer.attention().window);
  return out;
}

// The message of the refusal, which must be Error(11) and contain `part`.
void expect_refused(const std::string& text, const std::string& part) {
  try {
    parse_model_spec(text, "dir/config.json");
    ADD_FAILURE() << "accepted: " << text.substr(0, 300);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kInput);
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("dir/config.json"), std::string::npos) << error.what();
    EXPECT_FALSE(error.text().next.empty());
  }
}

TEST(ModelSpec, ReadsEveryFieldOfALlama) {
  json config = llama();
  config["rope_scaling"] = llama3_scaling(32);
  config["pad_token_id"] = 128004;
  const ModelSpec spec = parse(config);
  EXPECT_EQ(spec.model_type, "llama");
  EXPECT_EQ(spec.architecture, "LlamaForCausalLM");
  EXPECT_EQ(spec.hidden, 2048);
  EXPECT_EQ(spec.layer(0).mlp().ffn, 8192);
  EXPECT_EQ(spec.layer_count(), 2);
  EXPECT_EQ(spec.layer(1).attention().heads, 32);
  EXPECT_EQ(spec.layer(1).attention().kv_heads, 8);
  EXPECT_EQ(spec.layer(1).attention().head_dim, 64);
  EXPECT_EQ(spec.vocab, 128256);
  EXPECT_EQ(spec.max_positions, 131072);
  EXPECT_EQ(spec.final_norm.eps, 1e-5);
  EXPECT_EQ(spec.ropes.front().theta, 5e5);
  EXPECT_EQ(spec.ropes.front().scaling, RopeSpec::Scaling::kLlama3);
  EXPECT_EQ(spec.ropes.front().factor, 32);
  EXPECT_EQ(spec.ropes.front().original_max_position, 8192);
  EXPECT_TRUE(spec.tied);
  for (const LayerSpec& layer : spec.layers) {
    const AttentionSpec& attention = layer.attention();
    EXPECT_FALSE(attention.qkv_bias || attention.out_bias || layer.mlp().bias || attention.head_norm);
    EXPECT_TRUE(attention.rotates());
  }
  EXPECT_EQ(spec.pad_token, 128004);
  EXPECT_EQ(windows(spec), (std::vector<int64_t>{0, 0}));
}

TEST(ModelSpec, TheLongestTextIsThatOfScaledPositions) {
  json config = llama();
  config["max_position_embeddings"] = 4096;
  EXPECT_EQ(parse(config).longest_text(), 4096);
  config["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 4.0}};
  EXPECT_EQ(parse(config).longest_text(), 16384);
  config["rope_scaling"] = llama3_scaling(8);  // of 8192 positions
  EXPECT_EQ(parse(config).longest_text(), 65536);
  config["max_position_embeddings"] = 131072;
  EXPECT_EQ(parse(config).longest_text(), 131072);
  config["max_position_embeddings"] = 4096;
  config["rope_scaling"] = {{"rope_type", "dynamic"}, {"factor", 2.0}};
  EXPECT_EQ(parse(config).longest_text(), 8192);
  config["rope_scaling"] = {
      {"rope_type", "yarn"}, {"factor", 16.0}, {"original_max_position_embeddings", 1024}};
  EXPECT_EQ(parse(config).longest_text(), 16384);
}

TEST(ModelSpec, MissingKeysTakeTheDefaultsOfTheFamilysClass) {
  for (const char* type : {"llama", "qwen2", "qwen3", "mistral"}) {
    json config = family(type);
    for (const char* key : {"architectures", "num_key_value_heads", "rms_norm_eps", "rope_theta",
                            "hidden_act", "max_position_embeddings", "tie_word_embeddings", "torch_dtype"}) {
      config.erase(key);
    }
    const ModelSpec spec = parse(config);
    const std::string name = type;
    EXPECT_EQ(spec.final_norm.eps, 1e-6);
    EXPECT_EQ(spec.ropes.front().theta, 1e4);
    EXPECT_FALSE(spec.tied);
    EXPECT_EQ(spec.pad_token, -1);
    EXPECT_EQ(spec.layer(1).attention().kv_heads, name == "mistral" ? 8 : 32) << name;
    EXPECT_EQ(spec.layer(1).attention().head_dim, name == "qwen3" ? 128 : 64) << name;
    EXPECT_EQ(spec.max_positions, name == "llama" ? 2048 : name == "mistral" ? 131072 : 32768) << name;
    EXPECT_EQ(spec.layer(1).attention().window, name == "mistral" ? 4096 : 0) << name;
    EXPECT_EQ(spec.layer(1).attention().qkv_bias, name == "qwen2") << name;
    EXPECT_EQ(spec.layer(1).attention().head_norm.has_value(), name == "qwen3") << name;
  }
}

TEST(ModelSpec, TheOldAndTheNewFormOfRopeAreTheSameModel) {
  json old_form = llama(), new_form = llama();
  old_form["rope_scaling"] = llama3_scaling(8);
  new_form.erase("rope_theta");
  new_form.erase("torch_dtype");
  new_form["dtype"] = "bfloat16";
  new_form["rope_parameters"] = llama3_scaling(8);
  new_form["rope_parameters"]["rope_theta"] = 500000.0;
  EXPECT_EQ(rope_frequencies(parse(old_form).ropes[0]), rope_frequencies(parse(new_form).ropes[0]));
  new_form["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 12345.0}};
  EXPECT_EQ(parse(new_form).ropes.front().theta, 12345.0);
}

TEST(ModelSpec, BiasesAreReadAsTheFamilyUsesThem) {
  json config = llama();
  config["attention_bias"] = true;
  EXPECT_TRUE(parse(config).layer(1).attention().qkv_bias && parse(config).layer(1).attention().out_bias);
  config["mlp_bias"] = true;
  EXPECT_TRUE(parse(config).layer(1).mlp().bias);
  config = family("qwen3");
  config["attention_bias"] = true;
  EXPECT_TRUE(parse(config).layer(1).attention().qkv_bias && parse(config).layer(1).attention().out_bias);
  EXPECT_FALSE(parse(family("qwen2")).layer(1).attention().out_bias);
}

TEST(ModelSpec, WindowsFollowTheFamilysKeys) {
  json mistral = family("mistral");
  mistral["sliding_window"] = nullptr;
  EXPECT_EQ(windows(parse(mistral)), (std::vector<int64_t>{0, 0}));
  mistral["sliding_window"] = 128;
  EXPECT_EQ(windows(parse(mistral)), (std::vector<int64_t>{128, 128}));
  json qwen = family("qwen2");
  qwen["sliding_window"] = 128;
  qwen["max_window_layers"] = 1;
  EXPECT_EQ(windows(parse(qwen)), (std::vector<int64_t>{0, 0}));
  qwen["use_sliding_window"] = true;
  EXPECT_EQ(windows(parse(qwen)), (std::vector<int64_t>{0, 128}));
  qwen["max_window_layers"] = 0;
  EXPECT_EQ(windows(parse(qwen)), (std::vector<int64_t>{128, 128}));
  qwen["layer_types"] = {"sliding_attention", "full_attention"};
  EXPECT_EQ(windows(parse(qwen)), (std::vector<int64_t>{128, 0}));
  qwen["use_sliding_window"] = false;
  expect_refused(qwen.dump(), "layer_types");
}

TEST(ModelSpec, SmolLm3HasLayersWithoutPositions) {
  const auto rope = [](const json& config) {
    std::vector<int> out;
    for (const LayerSpec& layer : parse(config).layers) out.push_back(layer.attention().rotates());
    return out;
  };
  json config = family("smollm3");
  config["architectures"] = {"SmolLM3ForCausalLM"};
  for (const char* key :
       {"num_key_value_heads", "rope_theta", "max_position_embeddings", "tie_word_embeddings"})
    config.erase(key);
  config["num_hidden_layers"] = 9;
  EXPECT_EQ(rope(config), (std::vector<int>{1, 1, 1, 0, 1, 1, 1, 0, 1}));
  const ModelSpec spec = parse(config);
  EXPECT_EQ(spec.layer(1).attention().kv_heads, 4);
  EXPECT_EQ(spec.ropes.front().theta, 2e6);
  EXPECT_EQ(spec.max_positions, 32768);
  EXPECT_EQ(spec.pad_token, 128004);
  EXPECT_TRUE(spec.tied);
  config["pad_token_id"] = nullptr;
  EXPECT_EQ(parse(config).pad_token, -1);
  config["no_rope_layer_interval"] = 3;
  EXPECT_EQ(rope(config), (std::vector<int>{1, 1, 0, 1, 1, 0, 1, 1, 0}));
  config["num_hidden_layers"] = 2;
  config["no_rope_layers"] = {0, 1, 0};  // longer than the model: its beginning counts
  EXPECT_EQ(rope(config), (std::vector<int>{0, 1}));
  config["sliding_window"] = 16;
  EXPECT_EQ(windows(parse(config)), (std::vector<int64_t>{0, 0}));
  config["use_sliding_window"] = true;
  EXPECT_EQ(windows(parse(config)), (std::vector<int64_t>{16, 0}));
  config["layer_types"] = {"full_attention", "sliding_attention"};
  EXPECT_EQ(windows(parse(config)), (std::vector<int64_t>{0, 16}));
  for (const json& bad : {json({0}), json({1, 2}), json({1, true}), json(1)}) {
    config["no_rope_layers"] = bad;
    expect_refused(config.dump(), "no_rope_layers");
  }
  config.erase("no_rope_layers");
  config["no_rope_layer_interval"] = 0;
  expect_refused(config.dump(), "no_rope_layer_interval");
  config.erase("no_rope_layer_interval");
  config["vocab_size"] = 1000;
  config.erase("pad_token_id");
  expect_refused(config.dump(), "pad_token_id");  // the class's own lies outside
}

TEST(ModelSpec, ANegativePadTokenCountsFromTheEnd) {
  json config = llama();
  config["pad_token_id"] = -1;
  EXPECT_EQ(parse(config).pad_token, 128255);
}

TEST(ModelSpec, WhatIsNotImplementedIsRefusedByName) {
  const std::pair<const char*, json> kSets[] = {
      {"model_type", "deepseek_v3"},
      {"model_type", "phimoe"},
      {"model_type", "granite_swa"},
      {"model_type", "never_heard_of"},
      {"model_type", nullptr},
      {"architectures", {"LlamaForTokenClassification"}},
      {"architectures", "LlamaForCausalLM"},
      {"hidden_act", "gelu"},
      {"quantization_config", {{"quant_method", "gptq"}}},
      {"use_bidirectional_attention", true},
      {"attention_dropout", 0.1},
      {"partial_rotary_factor", 0.5},
      {"rope_scaling", {{"rope_type", "yarn"}}},
      {"rope_scaling", {{"type", "dynamic"}}},
      {"rope_scaling", {{"type", "never_heard_of"}, {"factor", 4.0}}},
      {"rope_scaling", {{"type", "longrope"}, {"short_factor", {1.0}}}},
      {"rope_scaling", {{"type", "linear"}}},
      {"rope_scaling", {{"type", "linear"}, {"factor", 0}}},
      {"rope_scaling", {{"rope_type", "llama3"}, {"factor", 8}}},
      {"rope_parameters", {{"full_attention", {{"rope_theta", 1e6}}}}},
      {"rope_parameters", 7},
      {"layer_types", {"full_attention", "linear_attention"}},
      {"layer_types", {"full_attention"}},
      {"layer_types", {"sliding_attention", "full_attention"}}};
  for (const auto& [key, value] : kSets) {
    json config = llama();
    config[key] = value;
    expect_refused(config.dump(), key);
  }
  json config = llama();
  config["quantization_config"] = {{"quant_method", "gptq"}};
  expect_refused(config.dump(), "gptq");
  config = llama();
  config["model_type"] = "mixtral";
  expect_refused(config.dump(), "mixtral");
}

TEST(ModelSpec, KnowsWhatBitsandbytesQuantized) {
  const auto stored = [](const json& quantization) {
    json config = llama();
    config["quantization_config"] = {{"quant_method", "bitsandbytes"}};
    config["quantization_config"].update(quantization);
    return parse(config).stored;
  };
  EXPECT_EQ(parse(llama()).stored, EncodingKind::kPlain);
  EXPECT_EQ(stored({{"load_in_4bit", true}, {"bnb_4bit_quant_type", "nf4"}}), EncodingKind::kNf4);
  EXPECT_EQ(
      stored({{"load_in_4bit", true}, {"bnb_4bit_quant_type", "nf4"}, {"bnb_4bit_use_double_quant", true}}),
      EncodingKind::kNf4Double);
  EXPECT_EQ(stored({{"load_in_4bit", true}}), EncodingKind::kFp4);
  EXPECT_EQ(stored({{"load_in_8bit", true}, {"load_in_4bit", false}}), EncodingKind::kInt8);
  for (const json& bad :
       {json{{"load_in_4bit", true}, {"bnb_4bit_quant_type", "af4"}},
        json{{"load_in_4bit", true}, {"bnb_4bit_quant_storage", "float32"}},
        json{{"load_in_4bit", true}, {"load_in_8bit", true}}, json{{"load_in_4bit", false}}}) {
    json config = llama();
    config["quantization_config"] = {{"quant_method", "bitsandbytes"}};
    config["quantization_config"].update(bad);
    expect_refused(config.dump(), "quantization_config");
  }
}

TEST(ModelSpec, AWrongTypeOrRangeIsRefusedWithItsKey) {
  const char* const kSizes[] = {
      "hidden_size", "intermediate_size",   "num_hidden_layers", "num_attention_heads",
      "vocab_size",  "num_key_value_heads", "head_dim",          "max_position_embeddings"};
  for (const char* key : kSizes) {
    for (const json& value : {json(0), json(-1), json(1.5), json("2"), json(true), json(json::array({1})),
                              json(uint64_t{1} << 63), json(INT64_MAX), json(INT64_MIN)}) {
      json config = llama();
      config[key] = value;
      expect_refused(config.dump(), key);
    }
  }
  for (const char* key :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"}) {
    json config = llama();
    config.erase(key);
    expect_refused(config.dump(), key);
  }
  const std::pair<const char*, json> kSets[] = {
      {"num_attention_heads", 24},  // 8 divides 24; 2048 is no multiple
      {"num_key_value_heads", 7},
      {"head_dim", 63},
      {"rms_norm_eps", "small"},
      {"rms_norm_eps", -1.0},
      {"rope_theta", 0},
      {"rope_theta", true},
      {"tie_word_embeddings", 1},
      {"pad_token_id", 128256},
      {"pad_token_id", -128257},
      {"pad_token_id", 0.5},
      {"eos_token_id", {1, 128256}},
      {"bos_token_id", uint64_t{1} << 63}};
  for (const auto& [key, value] : kSets) {
    json config = llama();
    config[key] = value;
    expect_refused(config.dump(), std::string(key) == "num_attention_heads" ? "hidden_size" : key);
  }
}

TEST(ModelSpec, ADamagedFileIsRefusedWithTheByte) {
  expect_refused("", "byte");
  expect_refused("{", "byte");
  expect_refused("[1]", "object");
  expect_refused("{\"model_type\":\"llama\",\"model_type\":\"llama\"}", "twice");
  expect_refused("{\"a\":" + std::string(100000, '[') + std::string(100000, ']') + "}", "deeper");
  expect_refused("{\"rope_theta\":1e999}", "byte");
  expect_refused("{\"a\":\"" + std::string(5 << 20, 'x') + "\"}", "bytes");
  expect_refused("{\"a\":\"\xff\"}", "UTF-8");
}

// Distance in units of the last place.
int64_t ulps(float a, float b) {
  int32_t i = 0, j = 0;
  std::memcpy(&i, &a, 4);
  std::memcpy(&j, &b, 4);
  return std::abs(static_cast<int64_t>(i) - j);
}

// Expected: LlamaRotaryEmbedding(LlamaConfig(...)).inv_freq of transformers 5.23 with torch 2.11 on a CPU,
// whose vectorised power is good to one unit of the last place; so is ours.
void expect_frequencies(const json& config, const std::vector<float>& expected) {
  const std::vector<float> ours = rope_frequencies(parse(config).ropes.front());
  ASSERT_EQ(ours.size(), expected.size());
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_LE(ulps(ours[i], expected[i]), 2) << i << ": " << ours[i];
}

TEST(RopeFrequencies, EqualTransformersWithoutScaling) {
  json config = llama();  // LlamaConfig(hidden_size=2048, num_attention_heads=32, rope_theta=10000.0)
  config["rope_theta"] = 1e4;
  expect_frequencies(
      config,
      {0x1p+0f,         0x1.7ff222p-1f,  0x1.1feb34p-1f,  0x1.afd136p-2f,  0x1.43d136p-2f, 0x1.e5a846p-3f,
       0x1.6c310ep-3f,  0x1.111aeep-3f,  0x1.99999ap-4f,  0x1.33281ap-4f,  0x1.ccab84p-5f, 0x1.59742ap-5f,
       0x1.030dc6p-5f,  0x1.84869ep-6f,  0x1.235a72p-6f,  0x1.b4f7e4p-7f,  0x1.47ae14p-7f, 0x1.eb736p-8f,
       0x1.708938p-8f,  0x1.145ceep-8f,  0x1.9e7c7p-9f,   0x1.36d21ap-9f,  0x1.d22a5p-10f, 0x1.5d931cp-10f,
       0x1.0624dep-10f, 0x1.892918p-11f, 0x1.26d42cp-11f, 0x1.ba2e4ap-12f, 0x1.4b96cp-12f, 0x1.f1502ap-13f,
       0x1.74eea6p-13f, 0x1.17a8e4p-13f});
}

TEST(RopeFrequencies, EqualTransformersWithLlama3Scaling) {
  json config = llama();  // ... rope_theta=500000.0, rope_scaling={llama3, 32, 1, 4, 8192}
  config["rope_scaling"] = llama3_scaling(32);
  expect_frequencies(
      config,
      {0x1p+0f,         0x1.53c38cp-1f,  0x1.c2ef78p-2f, 0x1.2b3dc6p-2f,  0x1.8d276p-3f,   0x1.078d4p-3f,
       0x1.5dc95ap-4f,  0x1.d03ccep-5f,  0x1.34119p-5f,  0x1.98de92p-6f,  0x1.0f5386p-6f,  0x1.681adap-7f,
       0x1.ddee9ep-8f,  0x1.3d2804p-8f,  0x1.a4ee4p-9f,  0x1.524f36p-10f, 0x1.c26c4p-12f,  0x1.9731eep-14f,
       0x1.46831ap-16f, 0x1.b15902p-17f, 0x1.1f91fp-17f, 0x1.7da9e8p-18f, 0x1.fa8b86p-19f, 0x1.5024d6p-19f,
       0x1.be2188p-20f, 0x1.280d96p-20f, 0x1.88ec2p-21f, 0x1.04be68p-21f, 0x1.5a0f4ep-22f, 0x1.cb4a9ap-23f,
       0x1.30c94ep-23f, 0x1.94836p-24f});
}

TEST(RopeFrequencies, EqualTransformersWithLinearScaling) {
  json config = llama();  // ... hidden_size=128, num_attention_heads=4, rope_scaling={linear, 3}
  config["hidden_size"] = 128;
  config["num_attention_heads"] = config["num_key_value_heads"] = 4;
  config["rope_theta"] = 1e4;
  config["rope_scaling"] = {{"type", "linear"}, {"factor", 3.0}};
  expect_frequencies(
      config, {0x1.555556p-2f, 0x1.7fe446p-3f, 0x1.afc19ep-4f, 0x1.e596bep-5f, 0x1.111112p-5f, 0x1.331d02p-6f,
               0x1.5967b2p-7f, 0x1.847898p-8f, 0x1.b4e81ap-9f, 0x1.eb61ap-10f, 0x1.1452f6p-10f,
               0x1.36c6ep-11f, 0x1.5d867ep-12f, 0x1.891ae6p-13f, 0x1.ba1e56p-14f, 0x1.f13e32p-15f});
}

}  // namespace
}  // namespace lm
