#include "weights/adapter_files.h"
#include "export/export_adapter.h"

#include <optional>

#include "tests/weights/support.h"
#include "weights/verify.h"

namespace lm {
namespace {

using nlohmann::json;
using test::contains;
using test::refusal;
using test::TemporaryDirectory;

const NameMap kNames = llama_names();

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
                const std::string& base_directory = "") {
  const ModelLayout layout = make_layout(tiny_spec(), &adapter, DType::kBF16);
  std::vector<float> values;
  const auto source = [&](size_t, const TensorPlace& place, int64_t) {
    values = values_of(place.parameter);
    return WeightView{reinterpret_cast<const std::byte*>(values.data()), DType::kF32};
  };
  write_adapter(directory, adapter, {"org/base", base_directory}, layout, source, false);
}

TEST(Adapter, WhatIsWrittenIsReadAgain) {
  const TemporaryDirectory directory;
  const AdapterSpec adapter = tiny_adapter();
  write_tiny(directory / "out", adapter);
  const AdapterConfig config = read_adapter_config(directory / "out", &kNames);
  EXPECT_EQ(config.base_model, "org/base");
  EXPECT_EQ(config.spec.r, 3);
  EXPECT_EQ(config.spec.alpha, 6);
  EXPECT_EQ(config.spec.dropout, 0.25);
  EXPECT_EQ(config.spec.targets, adapter.targets);
  const ModelLayout layout = make_layout(tiny_spec(), &config.spec, DType::kBF16);
  std::map<std::string, std::vector<float>> loaded;
  load_adapter(directory / "out", layout,
               [&](size_t, const TensorPlace& place) {
                 auto& values = loaded[place.parameter.name];
                 values.resize(static_cast<size_t>(place.parameter.elements()));
                 return LoadTarget{reinterpret_cast<std::byte*>(values.data()), DType::kF32};
               },
               {.threads = 2});
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
  const AdapterSpec read = read_adapter_config(directory / "out", &kNames).spec;
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
                                    "layers.0.mlp.down_proj"}),
                              json("model\\..*\\.(q|down)_proj")}) {
    config["target_modules"] = targets;
    test::write_text(path, config.dump());
    EXPECT_EQ(read_adapter_config(directory / "out", &kNames).spec.targets, tiny_adapter().targets);
  }
}

TEST(Adapter, SettingsThatAreNotImplementedAreRefusedByName) {
  const TemporaryDirectory directory;
  write_tiny(directory / "out", tiny_adapter());
  const std::string path = directory / "out/adapter_config.json";
  const json good = json::parse(test::read_text(path));
  const std::pair<const char*, json> kSets[] = {{"use_dora", 1},
                                                {"bias", "all"},
                                                {"lora_bias", true},
                                                {"modules_to_save", {"lm_head"}},
                                                {"rank_pattern", {{"q_proj", 8}}},
                                                {"alpha_pattern", {{"q_proj", 8}}},
                                                {"layers_to_transform", {0}},
                                                {"fan_in_fan_out", true},
                                                {"trainable_token_indices", {1}},
                                                {"exclude_modules", "x"},
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
                                                {"target_modules", {"lm_head"}},
                                                {"target_modules", json::array()},
                                                {"target_modules", nullptr}};
  for (const auto& [key, value] : kSets) {
    json config = good;
    config[key] = value;
    test::write_text(path, config.dump());
    const std::string message = refusal([&] { read_adapter_config(directory / "out", &kNames); });
    EXPECT_TRUE(contains(message, key) ||
                (std::string(key) == "target_modules" && contains(message, "target")))
        << message;
  }
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
