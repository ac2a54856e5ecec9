// What of a model llama.cpp has a place for: each family's plain shape is accepted, and what its
// implementation does not compute is refused by name. (tests/e2e/test_gguf.py reads the files.)
#include "export/gguf_layers.h"

#include <cmath>
#include <functional>

#include "tests/weights/support.h"

namespace lm {
namespace {

using test::contains;
using test::refusal;

using Change = std::function<void(ModelSpec&)>;

ModelSpec llama(const std::string& model_type, int64_t layers = 4) {
  nlohmann::json config = test::tiny_config("llama", true);
  config["hidden_size"] = 24;  // heads * head_dim
  config["num_hidden_layers"] = layers;
  ModelSpec spec = parse_model_spec(config.dump(), "config.json");
  spec.model_type = model_type;
  return spec;
}

void each_attention(ModelSpec& spec, const std::function<void(AttentionSpec&)>& change) {
  for (LayerSpec& layer : spec.layers) change(layer.attention());
}

void set_norms(ModelSpec& spec, const NormSpec& norm, bool before, bool after) {
  spec.final_norm = norm;
  for (LayerSpec& layer : spec.layers) {
    for (SublayerSpec& sublayer : layer.sublayers) {
      sublayer.norm = before ? std::optional(norm) : std::nullopt;
      sublayer.norm_after = after ? std::optional(norm) : std::nullopt;
    }
  }
}

void set_mlp(ModelSpec& spec, const MixerSpec& mlp) {
  for (LayerSpec& layer : spec.layers) layer.sublayers[1].mixer = mlp;
}

// Windows of 8 tokens in all layers but each n-th.
void slide(ModelSpec& spec, int64_t n) {
  for (size_t i = 0; i < spec.layers.size(); ++i)
    spec.layers[i].attention().window = (static_cast<int64_t>(i) + 1) % n == 0 ? 0 : 8;
}

ModelSpec gpt2() {
  ModelSpec spec = llama("gpt2");
  set_norms(spec, {.kind = NormKind::kLayer}, true, false);
  set_mlp(spec, PlainMlpSpec{.ffn = 20, .bias = true});
  each_attention(spec, [](AttentionSpec& a) {
    a.rope = AttentionSpec::kNoRope;
    a.qkv_bias = a.out_bias = true;
  });
  spec.ropes.clear();
  spec.embedding.positions = 64;
  return spec;
}

ModelSpec gemma(const std::string& model_type, int64_t layers, int64_t each) {
  ModelSpec spec = llama(model_type, layers);
  set_norms(spec, {.kind = NormKind::kRmsOffset}, true, true);
  set_mlp(spec, GatedMlpSpec{.activation = Activation::kGeluTanh, .ffn = 20});
  spec.embedding = {.scale = std::sqrt(24.0), .round_scale = true};
  slide(spec, each);
  return spec;
}

ModelSpec gemma2() {
  ModelSpec spec = gemma("gemma2", 4, 2);
  each_attention(spec, [](AttentionSpec& a) { a.softcap = 50; });
  spec.head.logit_cap = 30;
  return spec;
}

ModelSpec gemma3() {
  ModelSpec spec = gemma("gemma3_text", 6, 6);
  spec.ropes = {{.dim = 6, .theta = 1e6, .scaling = RopeSpec::Scaling::kLinear, .factor = 8}, {.dim = 6}};
  each_attention(spec, [&](AttentionSpec& a) {
    a.head_norm = spec.final_norm;
    a.rope = a.window > 0 ? 1 : 0;
  });
  return spec;
}

// Layers have inputs of their own, and the last two borrow the keys of the two before them.
ModelSpec gemma4() {
  ModelSpec spec = llama("gemma4_text", 4);
  set_norms(spec, {.kind = NormKind::kRmsLate}, true, true);
  set_mlp(spec, GatedMlpSpec{.activation = Activation::kGeluTanh, .ffn = 20});
  spec.embedding = {.scale = std::sqrt(24.0), .round_scale = true};
  spec.embedding.inputs = {.width = 4, .layers = 4, .vocab = spec.vocab, .norm = spec.final_norm};
  slide(spec, 2);
  spec.ropes = {{.dim = 6, .theta = 1e6, .scaling = RopeSpec::Scaling::kProportional, .turned = 1},
                {.dim = 6}};
  for (LayerSpec& layer : spec.layers) {
    AttentionSpec& a = layer.attention();
    a.head_norm = spec.final_norm;
    a.value_norm = NormSpec{.kind = NormKind::kRmsPlain};
    a.softmax_scale = 1;
    a.rope = a.window > 0 ? 1 : 0;
    layer.scalar = true;
    layer.sublayers.push_back({.norm = std::nullopt,
                               .mixer = LayerInputSpec{.activation = Activation::kGeluTanh, .width = 4},
                               .norm_after = spec.final_norm});
  }
  for (const size_t i : {2U, 3U}) {
    AttentionSpec& a = spec.layers[i].attention();
    a.source = static_cast<int64_t>(i) - 2;
    a.value_norm.reset();
    spec.layers[i].mlp().ffn = 40;
  }
  return spec;
}

// Experts beside each MLP.
ModelSpec gemma4_experts() {
  ModelSpec spec = gemma4();
  const NormSpec norm = spec.final_norm;
  const ExpertsSpec experts{.activation = Activation::kGeluTanh,
                            .experts = 4,
                            .chosen = 2,
                            .ffn = 8,
                            .renormalise = true,
                            .input_norm = norm,
                            .router_norm = NormSpec{.kind = NormKind::kRms},
                            .factors = true};
  for (LayerSpec& layer : spec.layers) {
    layer.sublayers[1].norm_joined = norm;
    layer.sublayers.insert(layer.sublayers.begin() + 2,
                           SublayerSpec{.norm = {}, .mixer = experts, .norm_after = norm, .beside = true});
  }
  return spec;
}

void put_beside(ModelSpec& spec) {
  set_norms(spec, {.kind = NormKind::kLayerNoBias}, true, false);
  spec.ropes.front().neighbours = true;
  for (LayerSpec& layer : spec.layers) {
    layer.sublayers[1].norm.reset();
    layer.sublayers[1].beside = true;
  }
}

ModelSpec cohere2() {
  ModelSpec spec = llama("cohere2");
  put_beside(spec);
  slide(spec, 4);
  each_attention(spec, [](AttentionSpec& a) {
    if (a.window == 0) a.rope = AttentionSpec::kNoRope;
  });
  return spec;
}

// Command R+ with 64 layers, and Command R with fewer.
ModelSpec cohere(int64_t layers, bool normed) {
  ModelSpec spec = llama("cohere", layers);
  put_beside(spec);
  each_attention(spec, [&](AttentionSpec& a) {
    if (normed) a.head_norm = spec.final_norm;
    a.own_norms = normed;
  });
  return spec;
}

ModelSpec olmo3() {
  ModelSpec spec = llama("olmo3");
  set_norms(spec, {.kind = NormKind::kRmsLate}, false, true);
  slide(spec, 4);
  spec.ropes = {{.dim = 6, .theta = 5e5, .scaling = RopeSpec::Scaling::kYarn, .factor = 8},
                {.dim = 6, .theta = 5e5}};
  each_attention(spec, [&](AttentionSpec& a) {
    a.head_norm = spec.final_norm;
    a.joint_norm = true;
    a.rope = a.window > 0 ? 1 : 0;
  });
  return spec;
}

ModelSpec phi3() {
  ModelSpec spec = llama("phi3");
  spec.ropes = {
      {.dim = 4, .scaling = RopeSpec::Scaling::kLongRope, .short_factors = {1, 1}, .long_factors = {2, 3}}};
  return spec;
}

ModelSpec ministral3() {
  ModelSpec spec = llama("ministral3");
  spec.ropes = {{.dim = 6,
                 .scaling = RopeSpec::Scaling::kYarn,
                 .factor = 16,
                 .original_max_position = 64,
                 .beta_fast = 8}};
  each_attention(spec, [](AttentionSpec& a) { a.position_slope = 0.1, a.position_period = 64; });
  return spec;
}

ModelSpec granite() {
  ModelSpec spec = llama("granite");
  spec.embedding.scale = 12;
  spec.head.logit_scale = 1.0 / 8;
  each_attention(spec, [](AttentionSpec& a) { a.softmax_scale = 0.01; });
  for (LayerSpec& layer : spec.layers) {
    for (SublayerSpec& sublayer : layer.sublayers) sublayer.residual_scale = 0.22;
  }
  return spec;
}

void check(const ModelSpec& spec) {
  check_layers(spec, llama_cpp_of(spec));
}

void expect_refused(ModelSpec spec, const Change& change, const std::string& what) {
  change(spec);
  const std::string text = refusal([&] { check(spec); });
  EXPECT_TRUE(contains(text, what)) << text;
}

TEST(GgufLayers, APlainModelOfEachShapeIsAccepted) {
  for (const ModelSpec& spec :
       {llama("llama"), llama("mistral"), gpt2(), gemma2(), gemma3(), gemma4(), gemma4_experts(), cohere2(),
        cohere(40, false), cohere(64, true), olmo3(), phi3(), ministral3(), granite()})
    EXPECT_NO_THROW(check(spec)) << spec.model_type;
  EXPECT_TRUE(contains(refusal([&] { check(llama("mamba")); }), "models of type \"mamba\""));
}

TEST(GgufLayers, WhatAnArchitectureDoesNotComputeIsRefusedByName) {
  const auto attention = [](const std::function<void(AttentionSpec&)>& change) -> Change {
    return [change](ModelSpec& spec) { each_attention(spec, change); };
  };
  expect_refused(llama("mistral"), attention([](auto& a) { a.qkv_bias = true; }), "biases of q, k and v");
  expect_refused(llama("llama"), attention([](auto& a) { a.softmax_scale = 0.5; }), "scale of the softmax");
  expect_refused(llama("llama"), attention([](auto& a) { a.softcap = 5; }), "soft caps of scores");
  expect_refused(llama("llama"), attention([](auto& a) { a.position_slope = 1; }),
                 "grow with their position");
  expect_refused(
      llama("llama"), [](auto& s) { s.head.logit_scale = 2; }, "a factor of logits");
  expect_refused(
      llama("llama"), [](auto& s) { s.embedding.scale = 2; }, "a factor of the embedding");
  expect_refused(
      llama("llama"), [](auto& s) { s.layers[1].mlp().ffn = 30; }, "MLPs of several sizes");
  expect_refused(
      llama("llama"), [](auto& s) { s.layers[1].scalar = true; }, "layers of this shape");
  expect_refused(
      llama("llama"), [](auto& s) { s.ropes[0].scaling = RopeSpec::Scaling::kDynamic; }, "dynamic RoPE");
  expect_refused(
      llama("llama"), [](auto& s) { s.layers[2].sublayers[0].norm->eps *= 2; }, "norms of several epsilons");
  expect_refused(
      llama("qwen2"), [](auto&) {}, "a model without biases of q, k and v");
  expect_refused(
      llama("qwen3"), [](auto&) {}, "a model without norms of q and k");
  expect_refused(
      gpt2(), [](auto& s) { s.embedding.positions = 0; }, "learned positions");
  expect_refused(
      gpt2(), [](auto& s) { s.final_norm.kind = NormKind::kRms; }, "norms of this kind");
  expect_refused(
      gpt2(),
      [](auto& s) { set_mlp(s, PlainMlpSpec{.activation = Activation::kRelu2, .ffn = 20, .bias = true}); },
      "this activation function");
  expect_refused(
      phi3(), [](auto& s) { s.hidden = 30; }, "not hidden_size / heads");
  expect_refused(
      llama("llama"), [](auto& s) { s.ropes[0].dim = 4; }, "RoPE of a part of a head");
  expect_refused(
      granite(), [](auto& s) { s.layers[1].sublayers[1].residual_scale = 1; }, "several factors");
  expect_refused(
      cohere2(), [](auto& s) { s.tied = false; }, "a head of its own");
  expect_refused(
      cohere2(), [](auto& s) { s.layers[3].attention().rope = 0; }, "RoPE in this layer");
  expect_refused(
      gemma2(), [](auto& s) { s.head.logit_cap = 0; }, "a model without a soft cap of logits");
  expect_refused(gemma2(), attention([](auto& a) { a.window = 0; }), "a model without windows");
  expect_refused(
      ministral3(), [](auto& s) { s.ropes[0].truncate = false; }, "yarn with frequencies");
  expect_refused(ministral3(), attention([](auto& a) { a.position_period = 32; }), "in this way");
}

TEST(GgufLayers, CommandRPlusIsKnownByItsLayers) {
  expect_refused(
      cohere(63, true), [](auto&) {}, "norms of q and k in fewer than 64 layers");
  expect_refused(
      cohere(64, false), [](auto&) {}, "64 layers or more without norms of q and k");
  expect_refused(
      cohere(64, true), [](auto& s) { s.layers[1].attention().head_norm.reset(); }, "in some layers alone");
  expect_refused(
      cohere(64, true), [](auto& s) { s.layers[1].attention().own_norms = false; }, "of this width");
}

TEST(GgufLayers, KeysAreBorrowedFromTheLastTwoLayersThatHaveTheirOwn) {
  expect_refused(
      llama("llama"), [](auto& s) { s.layers[3].attention().source = 2; }, "keys and values of others");
  expect_refused(
      gemma4(), [](auto& s) { s.layers[3].attention().source = 0; }, "borrowed from these layers");
  expect_refused(
      gemma4(),
      [](auto& s) {
        AttentionSpec& a = s.layers[2].attention();
        a.source = -1;
        a.value_norm = NormSpec{.kind = NormKind::kRmsPlain};
      },
      "borrowed from these layers");
  expect_refused(
      gemma4(),
      [](auto& s) {
        s.layers[1] = s.layers[3];
        s.layers[1].attention().source = 0;
      },
      "fewer than two layers with keys and values of their own");
}

TEST(GgufLayers, InputsOfLayersAreGemma4s) {
  expect_refused(
      llama("llama"), [](auto& s) { s.embedding.inputs.width = 4; }, "inputs of each layer");
  expect_refused(
      gemma4(), [](auto& s) { ++s.embedding.inputs.vocab; }, "other rows than the embedding's");
  expect_refused(
      gemma4(), [](auto& s) { s.layers[1].sublayers.pop_back(); }, "layers of this shape");
  expect_refused(
      gemma4(), [](auto& s) { s.embedding.inputs.width = 5; }, "inputs of layers of this shape");
  expect_refused(
      gemma4(), [](auto& s) { s.embedding.inputs.norm.eps *= 2; }, "norms of several epsilons");
}

TEST(GgufLayers, ExpertsBesideAnMlpAreGemma4s) {
  const auto experts = [](const std::function<void(ExpertsSpec&)>& change) -> Change {
    return [change](ModelSpec& s) { change(std::get<ExpertsSpec>(s.layers[1].sublayers[2].mixer)); };
  };
  expect_refused(gemma4_experts(), experts([](auto& e) { e.factors = false; }), "experts of this shape");
  expect_refused(gemma4_experts(), experts([](auto& e) { e.renormalise = false; }), "experts of this shape");
  expect_refused(gemma4_experts(), experts([](auto& e) { e.input_norm.reset(); }), "experts of this shape");
  expect_refused(gemma4_experts(), experts([](auto& e) { e.router_norm->eps *= 2; }), "several epsilons");
  expect_refused(gemma4_experts(), experts([](auto& e) { e.input_norm->eps *= 2; }), "several epsilons");
  expect_refused(
      gemma4_experts(), [](auto& s) { s.layers[1].sublayers[1].norm_joined->eps *= 2; }, "several epsilons");
  expect_refused(
      gemma4_experts(), [](auto& s) { s.layers[1].sublayers[2].beside = false; }, "experts of this shape");
  expect_refused(
      gemma4_experts(),
      [](auto& s) {
        s.layers[0].sublayers.erase(s.layers[0].sublayers.begin() + 2);
        s.layers[0].sublayers[1].norm_joined.reset();
      },
      "layers without experts");
  expect_refused(
      llama("llama"), [](auto& s) { s.layers[1].sublayers[1].norm_joined = s.final_norm; },
      "layers of this shape");
}

TEST(GgufLayers, TablesAndWindowsByKindOfLayer) {
  expect_refused(
      olmo3(), [](auto& s) { s.ropes[1].theta = 1e4; }, "RoPE of several bases");
  expect_refused(
      gemma3(), [](auto& s) { s.ropes[1].scaling = RopeSpec::Scaling::kLinear; }, "scaled RoPE in layers");
  expect_refused(
      gemma3(), [](auto& s) { s.layers[1].attention().rope = 0; }, "several RoPE tables");
  expect_refused(
      olmo3(), [](auto& s) { s.layers[0].attention().window = 9; }, "windows of several sizes");
  expect_refused(
      gemma2(), [](auto& s) { s.layers[0].attention().window = 0; }, "windows in these layers");

  ModelSpec spec = gemma3();
  const LlamaCpp& arch = llama_cpp_of(spec);
  EXPECT_EQ(full_each(spec, arch), 6);  // as it assumes itself
  slide(spec, 2);
  EXPECT_EQ(full_each(spec, arch), 2);
  each_attention(spec, [](AttentionSpec& a) { a.window = 8; });
  EXPECT_EQ(full_each(spec, arch), 0);
  each_attention(spec, [](AttentionSpec& a) { a.window = 0; });
  EXPECT_EQ(full_each(spec, arch), 1);
  spec.layers[4].attention().window = 8;
  EXPECT_EQ(full_each(spec, arch), std::nullopt);
}

// The largest Gemma divides by another number than its head size.
TEST(GgufLayers, TheLargestGemmaHasItsOwnScale) {
  ModelSpec spec = gemma("gemma2", 46, 2);
  each_attention(spec, [](AttentionSpec& a) {
    a.softcap = 50;
    a.head_dim = 8;
    a.softmax_scale = 1 / std::sqrt(6.0);  // 24 / 4
  });
  spec.ropes.front().dim = 8;
  spec.head.logit_cap = 30;
  EXPECT_NO_THROW(check(spec));
  each_attention(spec, [](AttentionSpec& a) { a.softmax_scale = 0; });
  EXPECT_TRUE(contains(refusal([&] { check(spec); }), "scale of the softmax"));
}

}  // namespace
}  // namespace lm
