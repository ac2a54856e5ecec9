#include "weights/adapter_files.h"
#include "export/export_adapter.h"

#include <cmath>
#include <optional>

#include "tests/weights/support.h"
#include "weights/verify.h"

namespace lm {
namespace {

using nlohmann::json;
using test::contains;
using test::refusal;
using test::TemporaryDirectory;

AdapterSpec tiny_adapter() {
  return {.r = 3, .alpha = 6, .rslora = false, .dropout = 0.25, .targets = {"q_proj", "down_proj"}};
}

ModelSpec tiny_spec() {
  return parse_model_spec(test::tiny_config().dump(), "config.json");
}

// Its own values for every element, by name.
std::vector<float> values_of(const Parameter& parameter) {
  std::vector<float> out(static_cast<size_t>(parameter.elements()));
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = test::tiny_value(parameter.name, static_cast<int64_t>(i)) + 1e-5f;
  return out;
}

void write_tiny(const std::string& directory, const AdapterSpec& adapter,
                const std::string& base_directory = "", bool patterns = false) {
  const ModelLayout layout = make_layout(tiny_spec(), &adapter, DType::kBF16);
  std::vector<float> values;
  const auto source = [&](size_t, const TensorPlace& place, int64_t) {
    values = values_of(place.parameter);
    return WeightView{reinterpret_cast<const std::byte*>(values.data()), DType::kF32};
  };
  write_adapter(directory, adapter, {"org/base", base_directory}, layout, source, {.patterns = patterns});
}

// A copy of its values, as the run that trains it has them.
std::map<std::string, std::vector<float>> load_tiny(const std::string& directory,
                                                    const AdapterSpec& adapter) {
  std::map<std::string, std::vector<float>> loaded;
  load_adapter(directory, make_layout(tiny_spec(), &adapter, DType::kBF16),
               [&](size_t, const TensorPlace& place) {
                 auto& values = loaded[place.parameter.name];
                 values.resize(static_cast<size_t>(place.parameter.elements()));
                 return LoadTarget{reinterpret_cast<std::byte*>(values.data()), DType::kF32};
               },
               {.threads = 2});
  return loaded;
}

AdapterSpec read_tiny(const std::string& directory) {
  const ModelSpec base = tiny_spec();
  return read_adapter_config(directory, &base).spec;
}

TEST(Adapter, WhatIsWrittenIsReadAgain) {
  const TemporaryDirectory directory;
  const AdapterSpec adapter = tiny_adapter();
  write_tiny(directory / "out", adapter);
  const ModelSpec base = tiny_spec();
  const AdapterConfig config = read_adapter_config(directory / "out", &base);
  EXPECT_EQ(config.base_model, "org/base");
  EXPECT_EQ(config.spec.r, 3);
  EXPECT_EQ(config.spec.alpha, 6);
  EXPECT_EQ(config.spec.dropout, 0.25);
  EXPECT_EQ(config.spec.targets, adapter.targets);
  const ModelLayout layout = make_layout(tiny_spec(), &config.spec, DType::kBF16);
  const std::map<std::string, std::vector<float>> loaded = load_tiny(directory / "out", config.spec);
  EXPECT_EQ(loaded.size(), 8u);  // two layers × two modules × A and B
  for (const BlockLayout& block : layout.blocks) {
    for (const TensorPlace& place : block.tensors) {
      if (place.frozen) continue;
      EXPECT_EQ(loaded.at(place.parameter.name), values_of(place.parameter));
    }
  }
  const VerifyResult verified = verify_model(directory / "out");
  EXPECT_TRUE(verified.ok) << verified.problem;
  EXPECT_TRUE(std::filesystem::exists(directory / "out/README.md"));
}

TEST(Adapter, TheBaseModelsTokenizerFilesStandBesideIt) {
  const TemporaryDirectory directory;
  std::filesystem::create_directories(directory / "base/additional_chat_templates");
  const std::vector<std::string> wanted = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                                           "special_tokens_map.json",
                                           "additional_chat_templates/tool_use.jinja"};
  for (const std::string& name : wanted) test::write_text(directory / "base/" + name, "of " + name);
  for (const char* name : {"config.json", "model.safetensors"})
    test::write_text(directory / "base/" + std::string(name), "{}");
  write_tiny(directory / "out", tiny_adapter(), directory / "base");
  for (const std::string& name : wanted) EXPECT_EQ(test::read_text(directory / "out/" + name), "of " + name);
  // With a config.json it would look like a model of its own.
  EXPECT_FALSE(std::filesystem::exists(directory / "out/config.json"));
  EXPECT_FALSE(std::filesystem::exists(directory / "out/model.safetensors"));
  EXPECT_TRUE(verify_model(directory / "out").ok);
}

TEST(Adapter, TheConfigHasSortedKeysAndShortSortedTargets) {
  const TemporaryDirectory directory;
  write_tiny(directory / "out", tiny_adapter());
  const std::string text = test::read_text(directory / "out/adapter_config.json");
  const auto config = nlohmann::ordered_json::parse(text);
  std::vector<std::string> keys;
  for (const auto& item : config.items()) keys.push_back(item.key());
  EXPECT_TRUE(std::is_sorted(keys.begin(), keys.end()));
  EXPECT_EQ(config["target_modules"].dump(), "[\"down_proj\",\"q_proj\"]");
  EXPECT_EQ(config["lora_alpha"].dump(), "6");
  EXPECT_EQ(text, config.dump(2) + "\n");
}

TEST(Adapter, RsLoraIsWrittenAsItsEqual) {
  const TemporaryDirectory directory;
  AdapterSpec adapter = tiny_adapter();
  adapter.r = 4;
  adapter.rslora = true;
  write_tiny(directory / "out", adapter);
  const AdapterSpec read = read_tiny(directory / "out");
  EXPECT_FALSE(read.rslora);
  EXPECT_EQ(read.alpha, 12);
  EXPECT_EQ(read.scale(), adapter.scale());
}

TEST(Adapter, WholePathsAndPatternsNameTheSameModules) {
  const TemporaryDirectory directory;
  write_tiny(directory / "out", tiny_adapter());
  const std::string path = directory / "out/adapter_config.json";
  json config = json::parse(test::read_text(path));
  for (const json& targets : {json({"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj",
                                    "layers.0.mlp.down_proj", "1.mlp.down_proj"}),
                              json("model\\..*\\.(q|down)_proj")}) {
    config["target_modules"] = targets;
    test::write_text(path, config.dump());
    EXPECT_EQ(read_tiny(directory / "out").targets, tiny_adapter().targets);
  }
}

TEST(Adapter, SettingsThatAreNotImplementedAreRefusedByName) {
  const TemporaryDirectory directory;
  write_tiny(directory / "out", tiny_adapter());
  const std::string path = directory / "out/adapter_config.json";
  const json good = json::parse(test::read_text(path));
  const std::pair<const char*, json> kSets[] = {{"use_dora", 1},
                                                {"bias", "some"},
                                                {"lora_bias", true},
                                                {"modules_to_save", {"up_proj"}},
                                                {"modules_to_save", {"mlp"}},
                                                {"modules_to_save", "lm_head"},
                                                {"rank_pattern", {{"q_proj", 0}}},
                                                {"rank_pattern", {{"q_proj", 2.5}}},
                                                {"rank_pattern", {{"(?P<x>q)_proj", 8}}},
                                                {"rank_pattern", {"q_proj"}},
                                                {"alpha_pattern", {{"q_proj", "8"}}},
                                                {"alpha_pattern", {{"[[:alpha:]]_proj", 8}}},
                                                {"layers_to_transform", "0"},
                                                {"layers_to_transform", {-1}},
                                                {"layers_pattern", "layers"},
                                                {"fan_in_fan_out", true},
                                                {"trainable_token_indices", {33}},
                                                {"exclude_modules", "(?i)Q_PROJ"},
                                                {"exclude_modules", {"q_proj", 1}},
                                                {"something_new", {{"x", 1}}},
                                                {"peft_type", "LOHA"},
                                                {"task_type", "SEQ_CLS"},
                                                {"init_lora_weights", "pissa"},
                                                {"init_lora_weights", "loftq"},
                                                {"r", 0},
                                                {"r", 2.5},
                                                {"r", uint64_t{1} << 63},
                                                {"lora_alpha", "8"},
                                                {"lora_dropout", 1.0},
                                                {"use_rslora", 1},
                                                {"target_modules", {"input_layernorm"}},
                                                {"target_modules", json::array()},
                                                {"target_modules", nullptr}};
  for (const auto& [key, value] : kSets) {
    json config = good;
    config[key] = value;
    test::write_text(path, config.dump());
    const std::string message = refusal([&] { read_tiny(directory / "out"); });
    EXPECT_TRUE(contains(message, key) ||
                (std::string(key) == "target_modules" && contains(message, "target")))
        << message;
  }
}

AdapterSpec uneven_adapter() {
  AdapterSpec out = tiny_adapter();
  out.ranks = {{"q_proj", 2}, {"model.layers.1.mlp.down_proj", 5}};
  out.alphas = {{"model.layers.0.self_attn.q_proj", 9}};
  return out;
}

// s B A of a module, element by element.
std::vector<double> product(const std::map<std::string, std::vector<float>>& tensors,
                            const std::string& module, const std::string& path, const AdapterSpec& adapter) {
  const auto &a = tensors.at(module + ".lora_A"), &b = tensors.at(module + ".lora_B");
  const auto rank = static_cast<size_t>(adapter.rank_of(path));
  const size_t columns = a.size() / rank, rows = b.size() / rank;
  std::vector<double> out(rows * columns);
  for (size_t i = 0; i < rows; ++i)
    for (size_t k = 0; k < rank; ++k)
      for (size_t j = 0; j < columns; ++j)
        out[i * columns + j] += adapter.scale_of(path) * double{b[i * rank + k]} * a[k * columns + j];
  return out;
}

TEST(Adapter, RanksAndAlphasThatDifferArePatternsOrFilledUpToOne) {
  const TemporaryDirectory directory;
  for (const bool rslora : {false, true}) {
    AdapterSpec adapter = uneven_adapter();
    adapter.rslora = rslora;
    const std::string own = directory / (rslora ? "own_rs" : "own"),
                      one = directory / (rslora ? "one_rs" : "one");
    write_tiny(own, adapter, "", true);
    write_tiny(one, adapter);
    EXPECT_EQ(read_tiny(own), adapter);
    const json config = json::parse(test::read_text(own + "/adapter_config.json"));
    EXPECT_EQ(config["rank_pattern"], json({{"q_proj", 2}, {"model.layers.1.mlp.down_proj", 5}}));
    EXPECT_EQ(config["alpha_pattern"], json({{"model.layers.0.self_attn.q_proj", 9}}));
    const AdapterSpec filled = read_tiny(one);
    EXPECT_EQ(filled.r, 5);
    EXPECT_FALSE(filled.rslora);
    EXPECT_TRUE(filled.ranks.empty() && filled.alphas.empty());
    const auto before = load_tiny(own, adapter), after = load_tiny(one, filled);
    for (const char* layer : {"0", "1"}) {
      for (const auto& [name, path] :
           {std::pair{"q_proj", "self_attn.q_proj"}, {"down_proj", "mlp.down_proj"}}) {
        const std::string ours = std::string("layers.") + layer + "." + name,
                          theirs = std::string("model.layers.") + layer + "." + path;
        const auto expected = product(before, ours, theirs, adapter),
                   got = product(after, ours, theirs, filled);
        ASSERT_EQ(got.size(), expected.size());
        for (size_t i = 0; i < got.size(); ++i)
          ASSERT_NEAR(got[i], expected[i], 1e-6 * (1 + std::abs(expected[i])));
      }
    }
  }
}

TEST(Adapter, LayersAreWrittenAndRead) {
  const TemporaryDirectory directory;
  AdapterSpec adapter = tiny_adapter();
  adapter.layers = {1};
  write_tiny(directory / "out", adapter);
  const std::string path = directory / "out/adapter_config.json";
  json config = json::parse(test::read_text(path));
  EXPECT_EQ(config["layers_to_transform"], json({1}));
  EXPECT_EQ(config["target_modules"], json({"down_proj", "q_proj"}));
  EXPECT_EQ(read_tiny(directory / "out"), adapter);
  EXPECT_EQ(load_tiny(directory / "out", adapter).size(), 4u);
  config["layers_to_transform"] = 1;
  config["layers_pattern"] = {"h", "layers"};
  test::write_text(path, config.dump());
  EXPECT_EQ(read_tiny(directory / "out"), adapter);
  config["layers_pattern"] = "blocks";  // no module has it
  test::write_text(path, config.dump());
  EXPECT_TRUE(contains(refusal([&] { read_tiny(directory / "out"); }), "choose no module"));
}

// PEFT leaves tensors out that its expression does not choose, and fresh what it has no tensors for.
TEST(Adapter, AnExpressionThatChoosesOtherModulesThanTheFileHasIsRefused) {
  const TemporaryDirectory directory;
  write_tiny(directory / "out", tiny_adapter());
  const std::string path = directory / "out/adapter_config.json";
  json config = json::parse(test::read_text(path));
  for (const char* wrong : {".*q_proj", ".*_proj", "model\\.layers\\.0\\..*(q|down)_proj"}) {
    config["target_modules"] = wrong;
    test::write_text(path, config.dump());
    EXPECT_TRUE(contains(refusal([&] { read_tiny(directory / "out"); }), "target_modules")) << wrong;
  }
  // What only Python reads is not compared.
  for (const char* right : {"(?P<all>.*)\\.(q|down)_proj", ".*(q|down)_proj\\Z"}) {
    config["target_modules"] = right;
    test::write_text(path, config.dump());
    EXPECT_EQ(read_tiny(directory / "out").targets, tiny_adapter().targets) << right;
  }
}

TEST(Adapter, TheFirstPatternInTheFileDecides) {
  const TemporaryDirectory directory;
  AdapterSpec adapter = tiny_adapter();
  adapter.alphas = {{"down_proj", 7}};
  write_tiny(directory / "out", adapter, "", true);
  const std::string path = directory / "out/adapter_config.json", text = test::read_text(path);
  const auto with = [&](const std::string& patterns) {
    json config = json::parse(text);
    config["alpha_pattern"] = "HERE";
    std::string changed = config.dump();
    test::write_text(path, changed.replace(changed.find("\"HERE\""), 6, patterns));
    return read_tiny(directory / "out");
  };
  EXPECT_EQ(with(R"({"mlp.down_proj": 7, "down_proj": 8})"), adapter);
  EXPECT_EQ(with(R"({"mlp.down_proj": 7, ".*": 6})"), adapter);
  EXPECT_EQ(with(R"({"layers\\.[01]\\.mlp\\..*": 7})"), adapter);
  EXPECT_EQ(with(R"({"^model.layers.[0-9]+.mlp.down.proj": 7})"), adapter);
  EXPECT_EQ(with(R"({"z.*": 9, "down_proj": 8, "a": 1, "mlp.down_proj": 7})").alphas.front().second, 8);
  EXPECT_TRUE(with(R"({"down": 7, "n_proj": 7})").alphas.empty());  // the end behind a point, not any end
}

TEST(Adapter, ALayerWithoutItsTensorsIsListed) {
  const TemporaryDirectory directory;
  const AdapterSpec adapter = tiny_adapter();
  write_tiny(directory / "out", adapter);
  json config = test::tiny_config();
  config["num_hidden_layers"] = 3;
  const ModelSpec larger = parse_model_spec(config.dump(), "config.json");
  const auto nothing = [](size_t, const TensorPlace&) { return LoadTarget{}; };
  std::string message = refusal(
      [&] { load_adapter(directory / "out", make_layout(larger, &adapter, DType::kF32), nothing, {}); });
  EXPECT_TRUE(contains(message, "missing: base_model.model.model.layers.2.self_attn.q_proj.lora_A.weight"))
      << message;
  AdapterSpec fewer = adapter;
  fewer.targets = {"q_proj"};
  message = refusal(
      [&] { load_adapter(directory / "out", make_layout(tiny_spec(), &fewer, DType::kF32), nothing, {}); });
  EXPECT_TRUE(contains(message, "unexpected: base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"))
      << message;
}

TEST(Adapter, IsVerifiedWithTheModelThatItIsFor) {
  const TemporaryDirectory directory;
  write_tiny(directory / "out", tiny_adapter());
  const auto verified = [&](const std::optional<ModelSpec>& base) {
    std::string asked;
    const VerifyResult result = verify_model(directory / "out", [&](const std::string& name) {
      asked = name;
      return base;
    });
    EXPECT_EQ(asked, "org/base");
    return result;
  };
  EXPECT_TRUE(verified(tiny_spec()).ok);
  EXPECT_TRUE(verified(std::nullopt).ok);
  ModelSpec wider = tiny_spec();
  for (LayerSpec& layer : wider.layers) layer.mlp().ffn += 8;
  const std::string shapes = verified(wider).problem;
  for (const char* part : {"2 tensors differ from what adapter_config.json and the base model describe",
                           "shape: base_model.model.model.layers.1.mlp.down_proj.lora_A.weight is [3, ",
                           "use the base model that the adapter was trained on"}) {
    EXPECT_TRUE(contains(shapes, part)) << part << " in\n" << shapes;
  }
  EXPECT_TRUE(contains(shapes, directory / "out")) << shapes;
  ModelSpec joined = tiny_spec();
  joined.names.modules = {{"self_attn.qkv_proj", "attn.q", "attn.v"},
                          {"self_attn.o_proj", "attn.o"},
                          {"mlp.gate_up_proj", "mlp.gate", "mlp.up"},
                          {"mlp.down_proj", "mlp.down"}};
  const VerifyResult refused = verified(joined);
  EXPECT_FALSE(refused.ok);
  for (const char* part : {"\"q_proj\" is not a linear layer of the model", "out/adapter_config.json",
                           "use the base model that the adapter was trained on"}) {
    EXPECT_TRUE(contains(refused.problem, part)) << part << " in\n" << refused.problem;
  }
}

}  // namespace
}  // namespace lm
