// A text model inside another one, and GPT-2's two layouts: names, towers, collisions, buffers, adapters.
#include <map>
#include <utility>

#include "export/export_adapter.h"
#include "export/export_model.h"
#include "tests/weights/support.h"
#include "weights/adapter_files.h"
#include "weights/initialise.h"
#include "weights/loader.h"
#include "weights/verify.h"

namespace lm {
namespace {

using nlohmann::json;
using test::contains;
using test::refusal;
using test::TemporaryDirectory;

TEST(TensorNames, EveryLayoutHasOneNameHere) {
  const std::pair<const char*, const char*> kTexts[] = {
      {"model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"},
      {"model.language_model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"},
      {"language_model.model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"},
      {"language_model.lm_head.weight", "lm_head.weight"},
      {"lm_head.weight", "lm_head.weight"},
      {"model.language_model.layers.0.layer_scalar", "model.layers.0.layer_scalar"},
      {"language_model.model.layers.0.mlp.up_proj.weight.absmax", "model.layers.0.mlp.up_proj.weight.absmax"},
      {"base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight",
       "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"},
      {"base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight",
       "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"},
      {"base_model.model.h.0.attn.c_attn.lora_A.weight",
       "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"},
      {"base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector.weight",
       "base_model.model.model.layers.0.mlp.up_proj.lora_magnitude_vector"},
      {"wte.weight", "transformer.wte.weight"},
      {"wpe.weight", "transformer.wpe.weight"},
      {"ln_f.bias", "transformer.ln_f.bias"},
      {"h.11.attn.c_attn.bias", "transformer.h.11.attn.c_attn.bias"},
      {"transformer.h.11.attn.c_attn.bias", "transformer.h.11.attn.c_attn.bias"},
      {"h.weight", "h.weight"},
      {"h.x.weight", "h.x.weight"},
      {"h..weight", "h..weight"},
      {"", ""}};
  for (const auto& [theirs, ours] : kTexts) {
    EXPECT_EQ(canonical_name(theirs).text, ours) << theirs;
    EXPECT_EQ(canonical_name(theirs).use, TensorUse::kText) << theirs;
    // A canonical name is its own.
    EXPECT_EQ(canonical_name(ours).text, ours);
    EXPECT_EQ(canonical_name(wrapped_name(ours)).text, ours);
  }
  EXPECT_EQ(wrapped_name("model.norm.weight"), "model.language_model.norm.weight");
  EXPECT_EQ(wrapped_name("lm_head.weight"), "lm_head.weight");
  EXPECT_EQ(wrapped_name("base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"),
            "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_B.weight");
}

TEST(TensorNames, TowersAndMasksAreNoTextModels) {
  for (const char* name :
       {"vision_tower.vision_model.embeddings.position_embedding.weight", "model.vision_tower.x.weight",
        "multi_modal_projector.linear_1.weight", "model.multi_modal_projector.mm_input_projection_weight",
        "model.audio_tower.x.bias", "model.embed_vision.embedding_projection.weight",
        "model.embed_audio.x.weight", "model.visual.blocks.0.attn.qkv.weight", "mtp.fc.weight",
        "base_model.model.model.vision_tower.x.q_proj.lora_A.weight"}) {
    EXPECT_EQ(canonical_name(name).use, TensorUse::kTower) << name;
    EXPECT_EQ(canonical_name(name).text, name);
  }
  for (const char* name : {"h.0.attn.bias", "h.0.attn.masked_bias", "transformer.h.7.attn.bias"})
    EXPECT_EQ(canonical_name(name).use, TensorUse::kUnused) << name;
}

const std::vector<TensorInfo> kTowers = {{"vision_tower.blocks.0.attn.q_proj.weight", DType::kF32, {3, 5}},
                                         {"vision_tower.step", DType::kI64, {}},
                                         {"multi_modal_projector.linear.weight", DType::kF16, {7}}};

// Where each layout has the text model, the head and the towers.
struct Layout {
  const char* name;
  const char *text, *head, *tower;
};
constexpr Layout kLayouts[] = {{"line 4", "language_model.model.", "language_model.lm_head.", ""},
                               {"line 5", "model.language_model.", "lm_head.", "model."}};

std::string name_in(const Layout& layout, const std::string& ours) {
  if (ours.starts_with("model.")) return layout.text + ours.substr(6);
  if (ours.starts_with("lm_head.")) return layout.head + ours.substr(8);
  return layout.tower + ours;
}

// The bytes of every tensor are those of its name in the text model alone.
std::vector<std::byte> bytes_of(TensorInfo info) {
  info.name = canonical_name(info.name).text;
  if (info.dtype != DType::kI64) return test::tiny_bytes(info);
  return std::vector<std::byte>(8, std::byte{0x42});
}

ModelSpec write_wrapped(const std::string& directory, const Layout& layout, DType dtype) {
  const json text = test::tiny_config();
  std::filesystem::create_directories(directory);
  test::write_text(directory + "/config.json", json{{"model_type", "gemma3"},
                                                    {"text_config", text},
                                                    {"vision_config", {{"dtype", "float16"}}},
                                                    {"dtype", "float32"}}
                                                   .dump(2));
  ModelSpec spec = parse_model_spec(text.dump(), "config.json");
  spec.wrapper = "gemma3";
  std::vector<TensorInfo> infos = test::tiny_tensors(spec, dtype);
  for (const TensorInfo& tower : kTowers) infos.push_back(tower);
  for (TensorInfo& info : infos) info.name = name_in(layout, info.name);
  SafetensorsWriter writer(directory + "/model.safetensors", infos);
  for (const TensorInfo& info : writer.order()) writer.write(info.name, bytes_of(info));
  writer.commit();
  return spec;
}

using Memory = std::map<std::string, std::vector<std::byte>>;

Memory load(const std::string& directory, const ModelSpec& spec, const ModelLayout& layout) {
  Memory memory;
  const auto target = [&](size_t, const TensorPlace& place) {
    auto& bytes = memory[place.parameter.name];
    bytes.assign(static_cast<size_t>(place.parameter.elements()) * 4, std::byte{0x5A});
    return LoadTarget{bytes.data(), DType::kF32};
  };
  load_model(ModelFiles(directory), spec, layout, target, {.threads = 2});
  return memory;
}

WeightSource source_of(const Memory& memory) {
  return [&memory](size_t, const TensorPlace& place, int64_t) {
    return WeightView{memory.at(place.parameter.name).data(), DType::kF32};
  };
}

TEST(Wrapped, EitherLayoutLoadsAndIsWrittenBackByteForByte) {
  const TemporaryDirectory directory;
  const ModelSpec plain = test::write_tiny_model(directory / "plain", test::tiny_config(), DType::kF32);
  const ModelLayout layout = make_layout(plain, nullptr, DType::kF32);
  const Memory expected = load(directory / "plain", plain, layout);
  for (const Layout& names : kLayouts) {
    const ModelSpec spec = write_wrapped(directory / "base", names, DType::kF32);
    for (const char* file : {"processor_config.json", "preprocessor_config.json"})
      test::write_text(directory / "base/" + std::string(file), file);
    check_model_files(ModelFiles(directory / "base"), spec);
    const Memory memory = load(directory / "base", spec, layout);
    EXPECT_TRUE(memory == expected) << names.name;
    ExportOptions options{.dtype = DType::kF32, .replace = true};
    export_model(directory / "out", directory / "base", layout, source_of(memory), options);
    for (const char* file :
         {"model.safetensors", "config.json", "processor_config.json", "preprocessor_config.json"})
      EXPECT_EQ(test::read_text(directory / "out/" + std::string(file)),
                test::read_text(directory / "base/" + std::string(file)))
          << names.name << " " << file;
    // In another type the towers stay what they are.
    options.dtype = DType::kBF16;
    export_model(directory / "out", directory / "base", layout, source_of(memory), options);
    const ModelFiles files(directory / "out");
    for (const ModelFiles::Tensor& tensor : files.tensors()) {
      std::vector<std::byte> bytes(static_cast<size_t>(tensor.entry->bytes()));
      tensor.file->read(*tensor.entry, 0, bytes);
      EXPECT_EQ(bytes, bytes_of({tensor.entry->name, tensor.entry->dtype, tensor.entry->shape}));
      EXPECT_EQ(tensor.entry->dtype == DType::kBF16, tensor.use == TensorUse::kText) << tensor.name;
    }
    EXPECT_EQ(files.tensors().size(), 21 + kTowers.size());
    EXPECT_EQ(exported_tensors(directory / "base", layout, options).size(), files.tensors().size());
    const json config = json::parse(test::read_text(directory / "out/config.json"));
    EXPECT_EQ(config["dtype"], "bfloat16");
    EXPECT_EQ(config["text_config"]["torch_dtype"], "bfloat16");
    EXPECT_EQ(config["vision_config"]["dtype"], "float16");
  }
}

// Random weights are not the base's: its towers would see for another model.
TEST(Wrapped, AFreshModelHasNoTowers) {
  const TemporaryDirectory directory;
  const ModelSpec spec = write_wrapped(directory / "base", kLayouts[0], DType::kF32);
  const ModelLayout layout = make_layout(spec, nullptr, DType::kF32);
  const Memory memory = load(directory / "base", spec, layout);
  export_model(directory / "out", directory / "base", layout, source_of(memory),
               {.dtype = DType::kF32, .fresh = true});
  const ModelFiles files(directory / "out");
  EXPECT_EQ(files.tensors().size(), 21u);
  EXPECT_EQ(files.find("model.norm.weight")->entry->name, "model.language_model.norm.weight");
  EXPECT_EQ(files.find("lm_head.weight")->entry->name, "lm_head.weight");
  EXPECT_TRUE(load(directory / "out", spec, layout) == memory);
}

TEST(Wrapped, TowersAreExpectedOnlyInAWrapper) {
  const TemporaryDirectory directory;
  ModelSpec spec = write_wrapped(directory / "base", kLayouts[0], DType::kF32);
  spec.wrapper.clear();
  const std::string text = refusal([&] { check_model_files(ModelFiles(directory / "base"), spec); });
  EXPECT_TRUE(contains(text, "3 tensors differ") && contains(text, "unexpected: vision_tower.step []"))
      << text;
}

TEST(Wrapped, AQuantizedTowerIsNotWrittenAsIfItWerePlain) {
  const TemporaryDirectory directory;
  const ModelSpec spec = write_wrapped(directory / "base", kLayouts[1], DType::kF32);
  const ModelLayout layout = make_layout(spec, nullptr, DType::kF32);
  const Memory memory = load(directory / "base", spec, layout);
  std::vector<TensorInfo> infos = test::tiny_tensors(spec, DType::kF32);
  for (TensorInfo& info : infos) info.name = name_in(kLayouts[1], info.name);
  infos.push_back({"model.vision_tower.x.weight", DType::kU8, {4}});
  test::write_tensors(directory / "base/model.safetensors", infos);
  const std::string text = refusal([&] {
    export_model(directory / "out", directory / "base", layout, source_of(memory), {.dtype = DType::kF32});
  });
  EXPECT_TRUE(contains(text, "model.vision_tower.x.weight is quantized")) << text;
  EXPECT_FALSE(std::filesystem::exists(directory / "out"));
}

TEST(Wrapped, TwoNamesOfOneTensorAreRefused) {
  const TemporaryDirectory directory;
  for (const auto& [a, b] :
       {std::pair("model.norm.weight", "language_model.model.norm.weight"),
        std::pair("model.language_model.norm.weight", "language_model.model.norm.weight"),
        std::pair("wte.weight", "transformer.wte.weight")}) {
    test::write_tensors(directory / "model.safetensors", {{a, DType::kF32, {2}}, {b, DType::kF32, {2}}});
    const std::string text = refusal([&] { ModelFiles files(directory.path()); });
    EXPECT_TRUE(contains(text, a) && contains(text, b) && contains(text, "in two layouts")) << text;
  }
}

// GPT-2's first files have no "transformer.", and the causal masks.
TEST(Gpt2Names, BothLayoutsLoadAndTheBasesIsWrittenByteForByte) {
  const TemporaryDirectory directory;
  ModelSpec spec = parse_model_spec(test::tiny_config("llama", true).dump(), "config.json");
  spec.names.embedding = "transformer.wte";
  spec.names.layers = "transformer.h.";
  spec.names.norm = "transformer.ln_f";
  const ModelLayout layout = make_layout(spec, nullptr, DType::kF32);
  Memory first;
  for (const bool prefixed : {true, false}) {
    std::filesystem::create_directories(directory / "base");
    test::write_text(directory / "base/config.json", test::tiny_config("llama", true).dump(2));
    std::vector<TensorInfo> infos = test::tiny_tensors(spec, DType::kF32);
    for (TensorInfo& info : infos) {
      if (!prefixed) info.name.erase(0, std::string("transformer.").size());
    }
    infos.push_back({prefixed ? "transformer.h.0.attn.bias" : "h.0.attn.bias", DType::kF32, {1, 1, 4, 4}});
    SafetensorsWriter writer(directory / "base/model.safetensors", infos);
    for (const TensorInfo& info : writer.order()) writer.write(info.name, bytes_of(info));
    writer.commit();
    const Memory memory = load(directory / "base", spec, layout);
    if (prefixed) first = memory;
    EXPECT_TRUE(memory == first);
    export_model(directory / "out", directory / "base", layout, source_of(memory),
                 {.dtype = DType::kF32, .replace = true});
    EXPECT_EQ(test::read_text(directory / "out/model.safetensors"),
              test::read_text(directory / "base/model.safetensors"));
  }
}

// A number of each layer, which the base has in fp32 though its other weights are in bf16.
TEST(Buffers, AreLoadedAndWrittenInTheirOwnType) {
  const TemporaryDirectory directory;
  const std::string name = "model.layers.1.layer_scalar";
  const ModelSpec spec = test::write_tiny_model(directory / "base", test::tiny_config(), DType::kBF16);
  ModelLayout layout = make_layout(spec, nullptr, DType::kBF16);
  TensorPlace place;
  place.parameter = {
      .name = "layers.1.scalar", .kind = ParameterKind::kBuffer, .rows = 1, .parts = {{name, 0, 1}}};
  place.frozen = true;
  layout.blocks[2].tensors.push_back(place);
  std::vector<TensorInfo> infos = test::tiny_tensors(spec, DType::kBF16);
  infos.push_back({name, DType::kF32, {1}});
  SafetensorsWriter writer(directory / "base/model.safetensors", infos);
  const float scalar = 0.700000048F;  // no bf16
  for (const TensorInfo& info : writer.order())
    writer.write(info.name, info.name == name
                                ? std::vector<std::byte>(std::as_bytes(std::span(&scalar, 1)).begin(),
                                                         std::as_bytes(std::span(&scalar, 1)).end())
                                : test::tiny_bytes(info));
  writer.commit();
  Memory memory = load(directory / "base", spec, layout);
  ASSERT_EQ(memory.at("layers.1.scalar").size(), sizeof scalar);
  EXPECT_EQ(std::memcmp(memory.at("layers.1.scalar").data(), &scalar, sizeof scalar), 0);
  memory.at("layers.1.scalar").assign(sizeof scalar, std::byte{0});  // what the run has of it is no matter
  export_model(directory / "out", directory / "base", layout, source_of(memory), {.dtype = DType::kBF16});
  EXPECT_EQ(test::read_text(directory / "out/model.safetensors"),
            test::read_text(directory / "base/model.safetensors"));
}

TEST(Initialise, NormsAndBuffersBeginNeutral) {
  for (const float neutral : {1.F, 0.F}) {
    for (const ParameterKind kind :
         {ParameterKind::kNorm, ParameterKind::kBuffer, ParameterKind::kFactors, ParameterKind::kBias}) {
      const Parameter parameter{.name = "x", .kind = kind, .rows = 3, .parts = {}, .neutral = neutral};
      std::vector<float> values(3, 9);
      initialise({parameter, 7, 1, DType::kF32}, reinterpret_cast<std::byte*>(values.data()), 0, 3);
      EXPECT_EQ(values, std::vector<float>(3, kind == ParameterKind::kBias ? 0 : neutral));
    }
  }
}

AdapterSpec tiny_adapter() {
  return {.r = 3, .alpha = 6, .targets = {"q_proj", "down_proj"}};
}

void write_tiny_adapter(const std::string& directory, const ModelLayout& layout, bool wrapped,
                        const AdapterSpec& adapter = tiny_adapter()) {
  std::vector<float> values;
  const auto source = [&](size_t, const TensorPlace& place, int64_t) {
    values.assign(static_cast<size_t>(place.parameter.elements()), 0);
    for (size_t i = 0; i < values.size(); ++i)
      values[i] = test::tiny_value(place.parameter.name, static_cast<int64_t>(i));
    return WeightView{reinterpret_cast<const std::byte*>(values.data()), DType::kF32};
  };
  write_adapter(directory, adapter, {.name = "org/base", .directory = "", .wrapped = wrapped}, layout, source,
                {.patterns = true});
}

// As PEFT names modules of the class that a wrapper's file belongs to; and as it did in line 4, which is
// read.
TEST(Wrapped, AnAdapterHasTheWrappersNames) {
  const TemporaryDirectory directory;
  const ModelSpec spec = parse_model_spec(test::tiny_config().dump(), "config.json");
  const AdapterSpec adapter = tiny_adapter();
  const ModelLayout layout = make_layout(spec, &adapter, DType::kF32);
  write_tiny_adapter(directory / "plain", layout, false);
  write_tiny_adapter(directory / "wrapped", layout, true);
  const std::string weights = "adapter_model.safetensors";
  const SafetensorsFile plain(directory / "plain/" + weights), wrapped(directory / "wrapped/" + weights);
  ASSERT_EQ(plain.entries().size(), 8u);
  EXPECT_TRUE(plain.find("base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"));
  EXPECT_TRUE(wrapped.find("base_model.model.model.language_model.layers.1.mlp.down_proj.lora_B.weight"));
  const json config = json::parse(test::read_text(directory / "wrapped/adapter_config.json"));
  EXPECT_EQ(config["target_modules"], ".*\\blanguage_model\\..*\\.(down_proj|q_proj)");
  EXPECT_EQ(config["fan_in_fan_out"], false);
  const auto values = [&](const std::string& of) {
    Memory memory;
    load_adapter(directory / of, layout,
                 [&](size_t, const TensorPlace& place) {
                   auto& bytes = memory[place.parameter.name];
                   bytes.resize(static_cast<size_t>(place.parameter.elements()) * 4);
                   return LoadTarget{bytes.data(), DType::kF32};
                 },
                 {});
    return memory;
  };
  EXPECT_TRUE(values("wrapped") == values("plain"));
  check_adapter(directory / "wrapped", spec);
  EXPECT_EQ(read_adapter_config(directory / "wrapped", &spec).spec.targets, adapter.targets);
  // Whole paths, of either line.
  for (const char* prefix : {"model.language_model.layers.", "language_model.model.layers."}) {
    json paths = config;
    paths["target_modules"] = {
        prefix + std::string("0.self_attn.q_proj"), prefix + std::string("1.self_attn.q_proj"),
        prefix + std::string("0.mlp.down_proj"), prefix + std::string("1.mlp.down_proj")};
    test::write_text(directory / "wrapped/adapter_config.json", paths.dump());
    EXPECT_EQ(read_adapter_config(directory / "wrapped", &spec).spec.targets, adapter.targets);
  }
}

TEST(Wrapped, FactorsAndNormsAreNamedByWholePaths) {
  const TemporaryDirectory directory;
  const ModelSpec spec = parse_model_spec(test::tiny_config().dump(), "config.json");
  AdapterSpec ia3, norms;
  ia3.kind = AdapterKind::kIa3;
  ia3.targets = {"q_proj", "down_proj"};
  norms.kind = AdapterKind::kNorms;
  norms.targets = {"input_layernorm", "norm"};
  for (const AdapterSpec& adapter : {ia3, norms}) {
    const std::string out = directory / adapter.targets.front();
    write_tiny_adapter(out, make_layout(spec, &adapter, DType::kF32), true, adapter);
    EXPECT_EQ(read_adapter_config(out, &spec).spec, adapter) << out;
    check_adapter(out, spec);
  }
  const json config = json::parse(test::read_text(directory / "q_proj/adapter_config.json"));
  EXPECT_EQ(config["feedforward_modules"], (json{"model.language_model.layers.0.mlp.down_proj",
                                                 "model.language_model.layers.1.mlp.down_proj"}));
}

TEST(Wrapped, LayersAndRanksAreThoseOfTheTextModel) {
  const TemporaryDirectory directory;
  const ModelSpec spec = parse_model_spec(test::tiny_config().dump(), "config.json");
  AdapterSpec layers = tiny_adapter(), ranks = tiny_adapter(), paths = tiny_adapter();
  layers.layers = {1};
  ranks.ranks = {{"q_proj", 2}, {"model.layers.1.mlp.down_proj", 5}};
  paths.targets = {"model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"};
  int number = 0;
  for (const AdapterSpec& adapter : {layers, ranks, paths}) {
    const std::string out = directory / std::to_string(number++);
    write_tiny_adapter(out, make_layout(spec, &adapter, DType::kF32), true, adapter);
    EXPECT_EQ(read_adapter_config(out, &spec).spec, adapter) << number;
    check_adapter(out, spec);
  }
  const json config = json::parse(test::read_text(directory / "0/adapter_config.json"));
  EXPECT_EQ(config["target_modules"], ".*\\blanguage_model\\..*\\.(1)\\..*\\.(down_proj|q_proj)");
  EXPECT_EQ(config["layers_to_transform"], nullptr);
}

TEST(Gpt2Names, AnAdapterSaysHowTheBaseIsStored) {
  const TemporaryDirectory directory;
  const ModelSpec spec = parse_model_spec(test::tiny_config().dump(), "config.json");
  const AdapterSpec adapter = tiny_adapter();
  ModelLayout layout = make_layout(spec, &adapter, DType::kF32);
  for (TensorPlace& place : layout.blocks[1].tensors) {
    for (ParameterPart& part : place.parameter.parts)
      part.transposed = place.parameter.name.ends_with("mlp.down");
  }
  write_tiny_adapter(directory / "out", layout, false);
  EXPECT_EQ(json::parse(test::read_text(directory / "out/adapter_config.json"))["fan_in_fan_out"], true);
  ModelSpec base = spec;
  EXPECT_TRUE(contains(refusal([&] { read_adapter_config(directory / "out", &base); }), "fan_in_fan_out"));
  base.names.modules.back().transposed = true;
  EXPECT_EQ(read_adapter_config(directory / "out", &base).spec.targets, adapter.targets);
  EXPECT_EQ(read_adapter_config(directory / "out", nullptr).spec.r, 3);
}

}  // namespace
}  // namespace lm
