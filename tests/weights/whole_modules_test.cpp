// Adapters beside which modules of the model are trained whole (PEFT's modules_to_save), and copies of the
// base's matrices in their files.
#include "spec/whole_modules.h"
#include "export/export_adapter.h"
#include "tests/weights/support.h"
#include "weights/adapter_files.h"

namespace lm {
namespace {

using nlohmann::json;
using test::contains;
using test::refusal;
using test::TemporaryDirectory;

ModelSpec tiny_spec(bool tied) {
  return parse_model_spec(test::tiny_config("llama", tied).dump(), "config.json");
}

AdapterSpec tiny_adapter() {
  return {.r = 3, .alpha = 6, .targets = {"q_proj", "down_proj"}};
}

// Its own values for every element, by name.
std::vector<float> values_of(const Parameter& parameter) {
  std::vector<float> out(static_cast<size_t>(parameter.elements()));
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = test::tiny_value(parameter.name, static_cast<int64_t>(i)) + 1e-5f;
  return out;
}

// The embedding, a norm of the first layer and the head are trained whole.
AdapterSpec adapter_and_whole(const ModelSpec& base) {
  AdapterSpec out = tiny_adapter();
  out.also = {"model.embed_tokens", "model.layers.0.input_layernorm"};
  if (!base.tied) out.also.push_back("lm_head");
  return out;
}

void write_adapter_of(const std::string& directory, const ModelSpec& base, const AdapterSpec& adapter) {
  const ModelLayout layout = make_layout(base, &adapter, DType::kBF16);
  std::vector<float> values;
  const auto source = [&](size_t, const TensorPlace& place, int64_t) {
    values = values_of(place.parameter);
    return WeightView{reinterpret_cast<const std::byte*>(values.data()), DType::kF32};
  };
  write_adapter(directory, adapter, {.name = "org/base", .directory = "", .spec = &base}, layout, source, {});
}

TEST(WholeModules, ModulesThatAreTrainedWholeAreReadAgain) {
  for (const bool tied : {false, true}) {
    const TemporaryDirectory directory;
    const ModelSpec base = tiny_spec(tied);
    const AdapterSpec adapter = adapter_and_whole(base);
    write_adapter_of(directory / "out", base, adapter);
    EXPECT_EQ(read_adapter_config(directory / "out", &base).spec, adapter);
    const json config = json::parse(test::read_text(directory / "out/adapter_config.json"));
    // "input_layernorm" would be that of both layers.
    std::vector<std::string> entries = {"embed_tokens", "model.layers.0.input_layernorm"};
    if (!tied) entries.insert(entries.begin() + 1, "lm_head");
    EXPECT_EQ(config["modules_to_save"].get<std::vector<std::string>>(), entries);
    EXPECT_EQ(config["ensure_weight_tying"], tied);
    const auto file = ModelFiles(directory / "out", kAdapterWeights);
    EXPECT_TRUE(file.find("base_model.model.model.embed_tokens.weight").has_value());
    EXPECT_TRUE(file.find("base_model.model.lm_head.weight").has_value()) << "peft reads a tied head's copy";
    check_adapter(directory / "out", base);
  }
}

TEST(WholeModules, AnAdapterOfTheEmbeddingIsWrittenAndReadAgain) {
  const TemporaryDirectory directory;
  const ModelSpec base = tiny_spec(false);
  AdapterSpec adapter = tiny_adapter();
  adapter.targets = {"q_proj", "embed_tokens"};
  adapter.ranks = {{"embed_tokens", 2}};
  adapter.alphas = {{"embed_tokens", 5}};
  write_adapter_of(directory / "out", base, adapter);  // with one rank for all
  const ModelFiles file(directory / "out", kAdapterWeights);
  const std::string prefix = "base_model.model.model.embed_tokens.lora_embedding_";
  EXPECT_EQ(file.find(prefix + "A")->entry->shape, (std::vector<int64_t>{3, base.vocab}));
  EXPECT_EQ(file.find(prefix + "B")->entry->shape, (std::vector<int64_t>{base.hidden, 3}));
  const AdapterSpec again = read_adapter_config(directory / "out", &base).spec;
  EXPECT_EQ(again.targets, adapter.targets);
  check_adapter(directory / "out", base);
  // Its product stays: s B A of the table.
  const ModelLayout layout = make_layout(base, &again, DType::kF32);
  std::map<std::string, std::vector<float>> values;
  load_adapter(directory / "out", layout,
               [&](size_t, const TensorPlace& place) {
                 auto& to = values[place.parameter.name];
                 to.resize(static_cast<size_t>(place.parameter.elements()));
                 return LoadTarget{reinterpret_cast<std::byte*>(to.data()), DType::kF32};
               },
               {});
  const ModelLayout before = make_layout(base, &adapter, DType::kF32);
  const std::vector<float> a = values_of(before.blocks.front().find("embed.lora_A")->parameter),
                           b = values_of(before.blocks.front().find("embed.lora_B")->parameter);
  for (int64_t row = 0; row < base.vocab; ++row) {
    for (int64_t column = 0; column < base.hidden; ++column) {
      double was = 0, is = 0;
      for (int64_t k = 0; k < 2; ++k)
        was += double{b[static_cast<size_t>(row * 2 + k)]} * a[static_cast<size_t>(k * base.hidden + column)];
      for (int64_t k = 0; k < 3; ++k)
        is += double{values["embed.lora_B"][static_cast<size_t>(row * 3 + k)]} *
              values["embed.lora_A"][static_cast<size_t>(k * base.hidden + column)];
      EXPECT_NEAR(is * again.scale_of("model.embed_tokens"), was * adapter.scale_of("model.embed_tokens"),
                  1e-4);
    }
  }
}

TEST(WholeModules, PeftsEntriesAreEndsOfPathsWithoutAPoint) {
  const TemporaryDirectory directory;
  const ModelSpec base = tiny_spec(false);
  write_adapter_of(directory / "out", base, tiny_adapter());
  const std::string path = directory / "out/adapter_config.json";
  json config = json::parse(test::read_text(path));
  config["modules_to_save"] = {"norm", "head"};
  test::write_text(path, config.dump());
  EXPECT_EQ(
      read_adapter_config(directory / "out", &base).spec.also,
      (std::vector<std::string>{"model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm",
                                "model.layers.1.input_layernorm", "model.layers.1.post_attention_layernorm",
                                "model.norm", "lm_head"}));
}

TEST(WholeModules, OfATiedModelBothUsesAreTrainedOrNone) {
  const TemporaryDirectory directory;
  const ModelSpec base = tiny_spec(true);
  write_adapter_of(directory / "out", base, adapter_and_whole(base));
  const std::string path = directory / "out/adapter_config.json";
  json config = json::parse(test::read_text(path));
  const auto also = [&](const json& entries, bool ensured) {
    config["modules_to_save"] = entries;
    config["ensure_weight_tying"] = ensured;
    test::write_text(path, config.dump());
    return read_adapter_config(directory / "out", &base).spec.also;
  };
  const std::vector<std::string> embedding = {"model.embed_tokens"};
  EXPECT_EQ(also({"embed_tokens"}, true), embedding);
  EXPECT_EQ(also({"lm_head"}, true), embedding);
  EXPECT_EQ(also({"embed_tokens", "lm_head"}, false), embedding);
  EXPECT_TRUE(contains(refusal([&] { also({"embed_tokens"}, false); }), "ensure_weight_tying"));
  EXPECT_TRUE(contains(refusal([&] { also({"lm_head"}, false); }), "ensure_weight_tying"));
}

// Adds a tensor to an adapter's file, or replaces it.
void set_tensor(const std::string& directory, const std::string& name, const std::vector<int64_t>& shape,
                const std::vector<float>& values) {
  const std::string path = directory + "/" + kAdapterWeights;
  std::vector<TensorInfo> infos;
  std::map<std::string, std::vector<std::byte>> bytes;
  {
    const SafetensorsFile file(path);
    for (const SafetensorsEntry& entry : file.entries()) {
      if (entry.name == name) continue;
      infos.push_back({entry.name, entry.dtype, entry.shape});
      bytes[entry.name].resize(static_cast<size_t>(entry.bytes()));
      file.read(entry, 0, bytes[entry.name]);
    }
  }
  infos.push_back({name, DType::kF32, shape});
  const auto begin = reinterpret_cast<const std::byte*>(values.data());
  bytes[name].assign(begin, begin + values.size() * sizeof(float));
  SafetensorsWriter writer(path + ".new", infos);
  for (const TensorInfo& info : writer.order()) writer.write(info.name, bytes.at(info.name));
  writer.commit();
  std::filesystem::rename(path + ".new", path);
}

TEST(WholeModules, CopiesOfTheBasesMatricesAreComparedAndLeftAlone) {
  const TemporaryDirectory directory;
  const ModelSpec base = tiny_spec(false);
  test::write_tiny_model(directory / "base", test::tiny_config(), DType::kF32);
  const AdapterSpec adapter = tiny_adapter();
  std::vector<float> head(33 * 12);
  for (size_t i = 0; i < head.size(); ++i)
    head[i] = test::tiny_value("lm_head.weight", static_cast<int64_t>(i));
  const auto load = [&](const std::string& name) {
    std::filesystem::remove_all(directory / "out");
    write_adapter_of(directory / "out", base, adapter);
    set_tensor(directory / "out", name, {33, 12}, head);
    load_adapter(directory / "out", make_layout(base, &adapter, DType::kBF16),
                 [](size_t, const TensorPlace&) { return LoadTarget{}; },
                 {.base = &base, .base_directory = directory / "base"});
  };
  load("base_model.model.lm_head.base_layer.weight");
  load("base_model.model.lm_head.weight");
  EXPECT_TRUE(contains(refusal([&] { load("base_model.model.model.embed_tokens.weight"); }),
                       "is not the base model's, and modules_to_save does not name it"));
  head.back() += 1;
  EXPECT_TRUE(contains(refusal([&] { load("base_model.model.lm_head.base_layer.weight"); }),
                       "lm_head.base_layer.weight is not the base model's"));
  EXPECT_TRUE(contains(refusal([&] { load("base_model.model.model.norm.weight"); }), "unexpected"));
}

TEST(WholeModules, OfATiedModelTwoMatricesThatWereTrainedMustBeEqual) {
  const TemporaryDirectory directory;
  const ModelSpec base = tiny_spec(true);
  const AdapterSpec adapter = adapter_and_whole(base);
  const ModelLayout layout = make_layout(base, &adapter, DType::kF32);
  std::vector<float> head = values_of(layout.blocks.front().find("embed")->parameter);
  const auto load = [&] {
    std::filesystem::remove_all(directory / "out");
    write_adapter_of(directory / "out", base, adapter);
    set_tensor(directory / "out", "base_model.model.lm_head.weight", {33, 12}, head);
    load_adapter(directory / "out", layout, [](size_t, const TensorPlace&) { return LoadTarget{}; },
                 {.base = &base});
  };
  load();
  head.front() += 1;
  EXPECT_TRUE(contains(refusal(load), "PEFT has trained two matrices"));
}

TEST(WholeModules, AreNamedByWordsWhereAllOfThemAreChosen) {
  using Names = std::vector<std::string>;
  const ModelSpec base = tiny_spec(false);
  Names all;
  for (const WholeModule& module : whole_modules(base)) all.push_back(module.path);
  EXPECT_EQ(all.front(), "model.embed_tokens");
  EXPECT_EQ(all.back(), "lm_head");
  EXPECT_EQ(shortest_also(base, all), (Names{"embed_tokens", "norms", "lm_head"}));
  all.erase(all.begin() + 1);
  EXPECT_EQ(
      shortest_also(base, all),
      (Names{"embed_tokens", "model.layers.0.post_attention_layernorm", "model.layers.1.input_layernorm",
             "model.layers.1.post_attention_layernorm", "model.norm", "lm_head"}));
  EXPECT_EQ(whole_modules(tiny_spec(true)).back().path, "model.norm");
}

}  // namespace
}  // namespace lm
