// Which modules [lora] chooses, each with its rank and alpha.
#include "plan/adapter.h"

#include <gtest/gtest.h>

#include "base/error.h"
#include "config/config_print.h"
#include "config/config_toml.h"
#include "spec/adapter_sites.h"
#include "spec/block_layout.h"

namespace lm {
namespace {

using Ranks = std::vector<std::pair<std::string, int64_t>>;
using Alphas = std::vector<std::pair<std::string, double>>;

ModelSpec model() {
  return parse_model_spec(
      R"({"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3,
          "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 30})",
      "small");
}

LoraConfig lora(const std::string& keys) {
  const std::string rest =
      "model.path = \"m\"\n[data]\ntrain = [\"t\"]\n[train]\nmethod = \"lora\"\n[lora]\n";
  return parse_config(rest + keys, "c.toml").lora;
}

AdapterSpec chosen(const std::string& keys) {
  return configured_adapter(model(), lora(keys));
}

std::string refused(const std::string& keys) {
  try {
    chosen(keys);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), Exit::kConfig);
    return error.report();
  }
  ADD_FAILURE() << keys;
  return "";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Adapters, TargetsAreNamesPathsAndExpressions) {
  EXPECT_EQ(chosen("").targets, (std::vector<std::string>{"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj",
                                                          "up_proj", "down_proj"}));
  EXPECT_EQ(chosen("targets = [\"mlp.up_proj\", \"q_proj\"]").targets,
            (std::vector<std::string>{"q_proj", "up_proj"}));
  EXPECT_EQ(chosen("targets = [\"regex:self_attn.*[qk]_proj\"]").targets,
            (std::vector<std::string>{"q_proj", "k_proj"}));
  const AdapterSpec some = chosen("targets = [\"1.mlp.up_proj\", \"q_proj\"]");
  EXPECT_EQ(some.targets,
            (std::vector<std::string>{"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
                                      "model.layers.1.mlp.up_proj", "model.layers.2.self_attn.q_proj"}));
  EXPECT_TRUE(some.layers.empty());
}

TEST(Adapters, ExcludedModulesAndLayersAreLeftOut) {
  const AdapterSpec no_mlp = chosen("exclude = [\"regex:mlp\", \"o_proj\"]");
  EXPECT_EQ(no_mlp.targets, (std::vector<std::string>{"q_proj", "k_proj", "v_proj"}));
  EXPECT_EQ(no_mlp.layers, std::vector<int64_t>());
  const AdapterSpec last = chosen("targets = [\"q_proj\", \"v_proj\"]\nlayers = [2, 1]");
  EXPECT_EQ(last.targets, (std::vector<std::string>{"q_proj", "v_proj"}));
  EXPECT_EQ(last.layers, (std::vector<int64_t>{1, 2}));
  // The same choice in other words is the same adapter.
  EXPECT_EQ(chosen("targets = [\"q_proj\", \"v_proj\"]\nexclude = [\"regex:[.]0[.]\"]"), last);
  // A whole path is meant whatever its layer.
  EXPECT_EQ(chosen("targets = [\"q_proj\", \"model.layers.0.self_attn.q_proj\"]\nlayers = [1]").layers,
            (std::vector<int64_t>{0, 1}));
  const AdapterSpec spec = last;
  const ModelLayout layout = make_layout(model(), &spec, DType::kF32);
  EXPECT_EQ(layout.blocks[1].trainables.size(), 0U);
  EXPECT_EQ(layout.blocks[2].trainables.size(), 4U);
}

TEST(Adapters, TheFirstPatternGivesAModuleItsRankAndAlpha) {
  const AdapterSpec some = chosen(
      "r = 4\nalpha = 8\ntargets = [\"q_proj\", \"up_proj\"]\n"
      "ranks = {\"regex:[.]1[.]\" = 2, \"up_proj\" = 16}\nalphas = {q_proj = 3}");
  EXPECT_EQ(some.r, 4);
  EXPECT_EQ(some.ranks, (Ranks{{"model.layers.1.self_attn.q_proj", 2},
                               {"model.layers.0.mlp.up_proj", 16},
                               {"model.layers.1.mlp.up_proj", 2},
                               {"model.layers.2.mlp.up_proj", 16}}));
  EXPECT_EQ(some.alphas, (Alphas{{"q_proj", 3.0}}));
  EXPECT_EQ(some.scale_of("model.layers.1.self_attn.q_proj"), 1.5);
  EXPECT_EQ(some.scale_of("model.layers.2.mlp.up_proj"), 0.5);
  const ModelLayout layout = make_layout(model(), &some, DType::kF32);
  EXPECT_EQ(layout.blocks[2].find("layers.1.up_proj.lora_A")->parameter.rows, 2);
  EXPECT_EQ(layout.blocks[3].find("layers.2.up_proj.lora_B")->parameter.columns, 16);
  EXPECT_EQ(layout.blocks[3].find("layers.2.q_proj.lora_A")->parameter.rows, 4);
  // In the order of the file, not of the alphabet.
  EXPECT_EQ(chosen("targets = [\"q_proj\"]\nranks = {q_proj = 2, \"1.self_attn.q_proj\" = 5}").r, 2);
  // One rank for all is that of the adapter.
  const AdapterSpec one = chosen("r = 4\nranks = {\"regex:.\" = 6}");
  EXPECT_EQ(one.r, 6);
  EXPECT_TRUE(one.ranks.empty());
}

TEST(Adapters, WhatMatchesNothingIsRefused) {
  for (const auto& [keys, words] : std::vector<std::pair<std::string, std::string>>{
           {"targets = [\"qproj\"]", "is not a linear layer of the model"},
           {"targets = [\"regex:Q_PROJ\"]", "lora.targets: \"regex:Q_PROJ\" matches no linear layer"},
           {"exclude = [\"embed_positions\"]", "lora.exclude: \"embed_positions\" matches no linear layer"},
           {"layers = [3]", "lora.layers: the model has no layer 3"},
           {"exclude = [\"all-linear\"]", "leave no module"},
           {"targets = [\"q_proj\"]\nranks = {up_proj = 2}",
            "lora.ranks: \"up_proj\" matches no module that"},
           {"targets = [\"q_proj\"]\nalphas = {qproj = 2}", "did you mean"}}) {
    EXPECT_TRUE(has(refused(keys), words)) << refused(keys);
  }
  for (const auto& [keys, words] : std::vector<std::pair<std::string, std::string>>{
           {"ranks = {q_proj = 1.5}", "`lora.ranks`: expected a table such as"},
           {"ranks = {q_proj = 0}", "each an integer from 1 to 65536"},
           {"alphas = {q_proj = 0}", "`lora.alphas`: expected"},
           {"layers = [-1]", "`lora.layers`: expected a list of integers"},
           {"targets = [\"regex:(\"]", "lora.targets: \"regex:(\" is no regular expression"},
           {"ranks = {\"regex:[\" = 1}", "lora.ranks: \"regex:[\" is no regular expression"}}) {
    EXPECT_TRUE(has(refused(keys), words)) << refused(keys);
  }
}

TEST(Adapters, WhatARunRecordsChoosesTheSame) {
  for (const char* keys :
       {"", "layers = [0, 2]",
        "targets = [\"1.mlp.up_proj\", \"q_proj\"]\nexclude = [\"0.self_attn.q_proj\"]",
        "ranks = {\"regex:[.]1[.]\" = 2}\nalphas = {q_proj = 3, \"2.mlp.up_proj\" = 0.1}"}) {
    const AdapterSpec adapter = chosen(keys);
    Config config;
    config.model.path = "m";
    config.data.train = {"t"};
    config.train.method = Method::kLora;
    config.lora = resolved_lora(model(), lora(keys), adapter);
    const Config recorded = parse_config(print_config(config), "config.toml");
    EXPECT_EQ(configured_adapter(model(), recorded.lora), adapter) << keys;
  }
}

TEST(Adapters, WrittenKeysAgreeWithTheAdapterThatIsContinued) {
  const std::string keys =
      "r = 4\nalpha = 8\ntargets = [\"q_proj\", \"up_proj\"]\nlayers = [0, 1]\nranks = {q_proj = 2}\nalphas "
      "= {up_proj = 3}";
  const AdapterSpec given = chosen(keys);
  EXPECT_EQ(continued_adapter(model(), lora(""), given, "there"), given);
  EXPECT_EQ(continued_adapter(model(), lora(keys), given, "there"), given);
  AdapterSpec roots = continued_adapter(model(), lora("rslora = true"), given, "there");
  EXPECT_TRUE(roots.rslora);
  for (const char* path : {"model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"})
    EXPECT_NEAR(roots.scale_of(path), given.scale_of(path), 1e-12);
  for (const auto& [other, words] : std::vector<std::pair<std::string, std::string>>{
           {"layers = [0]",
            "in layers [0] is written, and the adapter has targets [\"q_proj\", \"up_proj\"] in layers [0, "
            "1]"},
           {"exclude = [\"up_proj\"]", "lora.targets = [\"q_proj\"] in layers [0, 1] is written"},
           {"ranks = {q_proj = 3}", "ranks {\"q_proj\" = 2}"},
           {"alphas = {q_proj = 3}", "alphas {\"up_proj\" = 3.0}"}}) {
    try {
      continued_adapter(model(), lora(other), given, "there");
      ADD_FAILURE() << other;
    } catch (const Error& error) {
      EXPECT_TRUE(has(error.report(), words)) << error.report();
    }
  }
}

Config method(const std::string& name, const std::string& keys = "") {
  return parse_config(
      "model.path = \"m\"\n[data]\ntrain = [\"t\"]\n[train]\nmethod = \"" + name + "\"\n[lora]\n" + keys,
      "c.toml");
}

TEST(Adapters, ModulesTrainedWholeAreWordsOrEndsOfPaths) {
  using Names = std::vector<std::string>;
  EXPECT_EQ(chosen("").also, Names());
  // This model's head is tied: the two are one tensor.
  for (const char* keys : {"also = [\"embed_tokens\"]", "also = [\"lm_head\"]",
                           "also = [\"lm_head\", \"model.embed_tokens\"]"}) {
    ModelSpec tied = model();
    tied.tied = true;
    const AdapterSpec adapter = configured_adapter(tied, lora(keys));
    EXPECT_EQ(adapter.also, Names{"model.embed_tokens"}) << keys;
    EXPECT_EQ(resolved_lora(tied, lora(keys), adapter).also, Names{"embed_tokens"});
  }
  EXPECT_EQ(chosen("also = [\"lm_head\", \"model.norm\", \"0.input_layernorm\"]").also,
            (Names{"model.layers.0.input_layernorm", "model.norm", "lm_head"}));
  const AdapterSpec norms = chosen("also = [\"norms\", \"embed_tokens\"]");
  EXPECT_EQ(norms.also.size(), 1U + 2 * 3 + 1);
  EXPECT_EQ(resolved_lora(model(), lora(""), norms).also, (Names{"embed_tokens", "norms"}));
  EXPECT_TRUE(has(refused("also = [\"q_proj\"]"),
                  "lora.also: \"q_proj\" is no embedding, head or norm of the model"));
  EXPECT_EQ(continued_adapter(model(), lora(""), norms, "there").also, norms.also);
  EXPECT_EQ(continued_adapter(model(), lora("also = [\"embed_tokens\", \"norms\"]"), norms, "there").also,
            norms.also);
  try {
    continued_adapter(model(), lora("also = [\"norms\"]"), norms, "there");
    ADD_FAILURE() << "other modules";
  } catch (const Error& error) {
    EXPECT_TRUE(has(error.report(),
                    "lora.also = [\"norms\"] is written, and the adapter has also "
                    "[\"embed_tokens\", \"norms\"]"))
        << error.report();
  }
}

TEST(Adapters, AnUntiedHeadIsATargetByItsNameAlone) {
  using Names = std::vector<std::string>;
  const std::string head = "lm_head";
  EXPECT_FALSE(chosen("").adapts(kNoLayer, head));
  const AdapterSpec some =
      chosen("targets = [\"q_proj\", \"lm_head\"]\nlayers = [0, 2]\nranks = {lm_head = 2}");
  EXPECT_EQ(some.targets, (Names{"q_proj", head}));
  EXPECT_EQ(some.layers, (std::vector<int64_t>{0, 2}));
  EXPECT_TRUE(some.adapts(kNoLayer, head));
  EXPECT_EQ(some.rank_of(head), 2);
  const auto blocks = list_parameters(model(), &some);
  EXPECT_EQ(blocks.back().trainable.size(), 2U);
  EXPECT_EQ(blocks.back().trainable[1].parts[0].name, "base_model.model.lm_head.lora_B.weight");
  EXPECT_EQ(blocks.back().trainable[1].columns, 2);
  ModelSpec tied = model();
  tied.tied = true;
  EXPECT_THROW(configured_adapter(tied, lora("targets = [\"lm_head\"]")), Error);
}

TEST(Adapters, TheEmbeddingOfAnUntiedModelIsATargetByItsNameAlone) {
  const std::string table = "model.embed_tokens";
  EXPECT_FALSE(chosen("").adapts(kNoLayer, table));
  const AdapterSpec some = chosen("targets = [\"q_proj\", \"embed_tokens\"]\nranks = {embed_tokens = 2}");
  EXPECT_TRUE(some.adapts(kNoLayer, table));
  EXPECT_EQ(some.rank_of(table), 2);
  const std::vector<Parameter> pair = list_parameters(model(), &some).front().trainable;
  ASSERT_EQ(pair.size(), 2U);
  const std::string prefix = "base_model.model.model.embed_tokens.lora_embedding_";
  EXPECT_EQ(pair[0].parts[0].name, prefix + "B");
  EXPECT_EQ(pair[0].shape(pair[0].parts[0]), (std::vector<int64_t>{model().hidden, 2}));
  EXPECT_EQ(pair[1].parts[0].name, prefix + "A");
  EXPECT_EQ(pair[1].shape(pair[1].parts[0]), (std::vector<int64_t>{2, model().vocab}));
  ModelSpec tied = model();
  tied.tied = true;
  EXPECT_THROW(configured_adapter(tied, lora("targets = [\"embed_tokens\"]")), Error);
}

ModelSpec mixture() {
  return parse_model_spec(
      R"({"model_type": "qwen3_moe", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 3,
          "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 30, "num_experts": 4,
          "num_experts_per_tok": 2, "moe_intermediate_size": 6, "mlp_only_layers": [1]})",
      "mixture");
}

TEST(Adapters, ExpertsAreTargetsByTheirOwnKeyOrTheirOwnNames) {
  const auto chosen_of = [](const std::string& keys) { return configured_adapter(mixture(), lora(keys)); };
  using Names = std::vector<std::string>;
  const Names attention = {"q_proj", "k_proj", "v_proj", "o_proj"};
  Names all = attention;
  all.insert(all.end(), {"experts.gate_up_proj", "experts.down_proj"});
  EXPECT_EQ(chosen_of("").targets, attention);
  EXPECT_EQ(chosen_of("experts = true").targets, all);
  EXPECT_EQ(chosen_of("targets = [\"regex:proj\"]").targets, attention);
  EXPECT_EQ(chosen_of("experts = true\nexclude = [\"down_proj\"]").targets,
            Names(all.begin(), all.end() - 1));
  EXPECT_EQ(chosen_of("targets = [\"q_proj\", \"experts.down_proj\"]").targets,
            (Names{"q_proj", "experts.down_proj"}));
  const AdapterSpec some =
      chosen_of("experts = true\nlayers = [0, 1]\n[lora.ranks]\n\"regex:experts.down\" = 2\n");
  EXPECT_EQ(some.layers, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(some.ranks, (Ranks{{"experts.down_proj", 2}}));
  EXPECT_THROW(chosen_of("targets = [\"down_proj\"]"), Error);
  EXPECT_NE(refused("experts = true").find("has none"), std::string::npos);
  // What a run records chooses the same.
  for (const char* const keys : {"experts = true", "experts = true\nexclude = [\"experts.down_proj\"]",
                                 "experts = true\nlayers = [2]", "targets = [\"experts.down_proj\"]"}) {
    const AdapterSpec adapter = chosen_of(keys);
    const LoraConfig recorded = resolved_lora(mixture(), lora(keys), adapter);
    EXPECT_EQ(configured_adapter(mixture(), recorded), adapter) << keys;
    EXPECT_EQ(resolved_lora(mixture(), recorded, adapter).experts, recorded.experts) << keys;
  }
}

TEST(Adapters, ModulesTrainedWholeHaveTheModelsType) {
  Config config = parse_config(
      "model.path = \"m\"\nmodel.dtype = \"bf16\"\n[data]\ntrain = [\"t\"]\n[train]\nmethod = "
      "\"lora\"\n[lora]\nalso = [\"norms\"]\n",
      "c.toml");
  EXPECT_FALSE(configured_adapter(model(), config).also.empty());
  config.lora.dtype = LoraDType::kF32;
  EXPECT_THROW(configured_adapter(model(), config), Error);
  config.lora.also.clear();
  EXPECT_TRUE(configured_adapter(model(), config).also.empty());
}

TEST(Adapters, WithoutPairsHavePeftsModulesUnlessOthersAreGiven) {
  using Names = std::vector<std::string>;
  const auto targets = [](const Config& config) { return configured_adapter(model(), config).targets; };
  EXPECT_EQ(targets(method("ia3")), (Names{"k_proj", "v_proj", "down_proj"}));
  EXPECT_EQ(targets(method("norms")), (Names{"input_layernorm", "post_attention_layernorm", "norm"}));
  EXPECT_EQ(targets(method("ia3", R"(targets = ["layers.1.mlp.up_proj", "q_proj"])")),
            (Names{"q_proj", "model.layers.1.mlp.up_proj"}));
  const Config recorded = method("norms", R"(targets = ["norm", "regex:^model.layers.2.input"])");
  const AdapterSpec some = configured_adapter(model(), recorded);
  EXPECT_EQ(some.targets, (Names{"model.layers.2.input_layernorm", "norm"}));
  EXPECT_EQ(resolved_lora(model(), recorded.lora, some).targets, some.targets);
  EXPECT_EQ(resolved_lora(model(), recorded.lora, some).r, LoraConfig().r);
}

TEST(Adapters, WithoutPairsRefuseWhatTheyDoNotHave) {
  const auto what = [](const auto& body) -> std::string {
    try {
      body();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), Exit::kConfig);
      return error.report();
    }
    ADD_FAILURE();
    return "";
  };
  EXPECT_NE(what([] { method("ia3", "r = 4"); }).find("lora.r is LoRA's"), std::string::npos);
  const auto chosen = [&](const Config& config) {
    return what([&] { configured_adapter(model(), config); });
  };
  for (const char* name : {"q_proj", "all-linear"})
    EXPECT_NE(chosen(method("norms", "targets = [\"" + std::string(name) + "\"]")).find("norm of the model"),
              std::string::npos);
  ModelSpec other = model();
  other.model_type = "smollm3";
  EXPECT_NE(what([&] { configured_adapter(other, method("ia3")); }).find("no default modules for smollm3"),
            std::string::npos);
  const AdapterSpec norms = configured_adapter(model(), method("norms"));
  EXPECT_NE(what([&] {
              continued_adapter(model(), method("ia3"), norms, "there");
            }).find("set train.method = \"norms\""),
            std::string::npos);
}

TEST(Adapters, VirtualTokensAreAsManyAsConfiguredOrAsTheContinuedOnes) {
  const auto config = [](const std::string& keys) {
    return parse_config(
        "[model]\npath = \"m\"\n[data]\ntrain = \"d\"\nmax_length = 16\n[train]\nmethod = \"prefix\"\n" +
            keys,
        "c.toml");
  };
  const Config seven = config("[prompt]\nlength = 7\n"), unwritten = config("[lora]\ninit = \"there\"\n");
  const AdapterSpec given = configured_adapter(model(), seven);
  EXPECT_EQ(given.kind, AdapterKind::kPrefix);
  EXPECT_EQ(given.virtual_tokens, 7);
  EXPECT_EQ(resolved_lora(model(), seven.lora, given).targets, seven.lora.targets);
  EXPECT_EQ(continued_adapter(model(), seven, given, "there"), given);
  AdapterSpec longer = given;
  const auto what = [&](const Config& asked) -> std::string {
    try {
      continued_adapter(model(), asked, longer, "there");
    } catch (const Error& error) {
      return error.report();
    }
    return "";
  };
  longer.virtual_tokens = 9;
  EXPECT_EQ(what(config("[prompt]\nlength = 9\n")), "");
  EXPECT_NE(what(seven).find("prompt.length = 7 is written, and the adapter has 9"), std::string::npos);
  longer.virtual_tokens = 15;
  EXPECT_NE(what(unwritten).find("leave 1 of data.max_length = 16"), std::string::npos);
}

TEST(Adapters, AnEncoderHasTheModelsSizeUnlessItIsGiven) {
  const auto config = [](const std::string& keys) {
    return parse_config(
        "[model]\npath = \"m\"\n[data]\ntrain = \"d\"\n[train]\nmethod = \"ptuning\"\n" + keys, "c.toml");
  };
  const AdapterSpec plain = configured_adapter(model(), config(""));
  EXPECT_EQ(plain.kind, AdapterKind::kPrompt);
  EXPECT_EQ(plain.virtual_tokens, 20);
  EXPECT_EQ(plain.encoder, model().hidden);
  EXPECT_FALSE(plain.encoded);
  const AdapterSpec small = configured_adapter(model(), config("[prompt]\nlength = 3\nhidden = 7\n"));
  EXPECT_EQ(small.virtual_tokens, 3);
  EXPECT_EQ(small.encoder, 7);
  Config prompt = config("");
  prompt.train.method = Method::kPrompt;
  const AdapterSpec given = configured_adapter(model(), prompt);
  EXPECT_EQ(given.encoder, 0);
  try {
    continued_adapter(model(), config(""), given, "there");
    ADD_FAILURE() << "a prompt without an encoder is continued with one";
  } catch (const Error& error) {
    EXPECT_NE(error.report().find("set train.method = \"prompt\""), std::string::npos);
  }
}

}  // namespace
}  // namespace lm
